"""sha256 of files and of JSON values; digests of files are remembered while their inode, size and times stay the same.

So 15 GB are hashed once, and a byte changed by any program is noticed without hashing what did not change: also by one that
sets the time of modification back, since nobody can set the inode's time of change (ctime). Rot that touches no time stamp is
found only with `remembered=False`. A memory that cannot be read or written (full disk) costs time, not the run.
"""

import hashlib
import json
import logging
import os
import sqlite3
import time
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from rl_core.home import home

log = logging.getLogger(__name__)

TICK_NS = 12_000_000
"""Two changes of a file within one tick of the kernel's clock (up to 10 ms) may have the same time stamp."""


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no white space: equal values, equal bytes. NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical form of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def digest_file(path: Path, remembered: bool = True) -> str:
    """sha256 (hex) of a file's content; from memory where the file has not been touched since it was hashed."""
    return digest_files([path], remembered)[path]


def digest_files(paths: list[Path], remembered: bool = True) -> dict[Path, str]:
    """`digest_file` of several, with one look into the memory."""
    stamps = {path: _stamp(path) for path in paths}
    known = _recall(stamps) if remembered else {}
    new = [path for path in stamps if path not in known]
    _wait_a_tick(new)
    hashed = {}
    for path in new:
        with path.open("rb") as file:
            hashed[path] = hashlib.file_digest(file, "sha256").hexdigest()
    # Somebody is writing a file whose stamp has changed: it is not remembered.
    _remember([(path, stamps[path], digest) for path, digest in hashed.items() if _stamp(path) == stamps[path]])
    return known | hashed


def _wait_a_tick(paths: list[Path]) -> None:
    """Until any later change has another time stamp than the last one so far (not with a file server whose clock is wrong)."""
    newest = max((os.stat(path).st_ctime_ns for path in paths), default=0)
    wait_ns = newest + TICK_NS - time.time_ns()
    if 0 < wait_ns <= TICK_NS:
        time.sleep(wait_ns / 1e9)


def _recall(stamps: dict[Path, str]) -> dict[Path, str]:
    query = "SELECT sha256 FROM digests WHERE path = ? AND stamp = ?"
    try:
        with closing(_memory()) as memory:
            rows = {path: memory.execute(query, (str(path.resolve()), stamp)).fetchone() for path, stamp in stamps.items()}
    except (sqlite3.Error, OSError) as error:
        _warn(str(error))
        return {}
    return {path: row[0] for path, row in rows.items() if row}


def _remember(digests: list[tuple[Path, str, str]]) -> None:
    if not digests:
        return
    rows = [(str(path.resolve()), stamp, digest) for path, stamp, digest in digests]
    try:
        with closing(_memory()) as memory, memory:
            memory.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", rows)
    except (sqlite3.Error, OSError) as error:
        _warn(str(error))


def moved(old: Path, new: Path) -> None:
    """Remember the digests of the files under a directory when it has been renamed: they need not be hashed again."""
    before, after = f"{old.parent.resolve() / old.name}/", f"{new.parent.resolve() / new.name}/"
    query = "UPDATE OR REPLACE digests SET path = ? || substr(path, ?) WHERE path > ? AND path < ?"
    try:
        with closing(_memory()) as memory, memory:
            memory.execute(query, (after, len(before) + 1, before, f"{before[:-1]}0"))  # "0" follows "/"
    except (sqlite3.Error, OSError) as error:
        _warn(str(error))


def _memory() -> sqlite3.Connection:
    home().mkdir(parents=True, exist_ok=True)
    memory = sqlite3.connect(home() / "digests.sqlite", timeout=60)
    memory.execute("CREATE TABLE IF NOT EXISTS digests (path TEXT PRIMARY KEY, stamp TEXT, sha256 TEXT)")
    return memory


@cache
def _warn(reason: str) -> None:
    """Once per reason."""
    log.warning("Digests of files are not remembered (%s: %s); files are hashed each time.", home() / "digests.sqlite", reason)


def _stamp(path: Path) -> str:
    stat = os.stat(path)
    return f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_dev}:{stat.st_ino}"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted names."""
    if isinstance(value, dict) and value:
        inner = f"{prefix}." if prefix else ""
        return {name: leaf for key, item in value.items() for name, leaf in flatten(item, f"{inner}{key}").items()}
    return {prefix: value}
