"""sha256 of files and of JSON values; digests of files are remembered while their inode, size and times stay the same.

So 15 GB are hashed once, and a byte changed by any program is noticed without hashing what did not change. Rot that
touches no time stamp is found only with `remembered=False`.
"""

import hashlib
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from rl_core.home import home


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
    with closing(_memory()) as memory:
        known = {path: _recall(memory, path) if remembered else None for path in paths}
        for path in paths:
            if known[path] is None:
                before = _stamp(path)
                with path.open("rb") as file:
                    known[path] = hashlib.file_digest(file, "sha256").hexdigest()
                if _stamp(path) == before:  # else somebody is writing it: do not remember
                    memory.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", (str(path.resolve()), before, known[path]))
        memory.commit()
    return {path: digest for path, digest in known.items() if digest is not None}


def _memory() -> sqlite3.Connection:
    home().mkdir(parents=True, exist_ok=True)
    memory = sqlite3.connect(home() / "digests.sqlite", timeout=60)
    memory.execute("CREATE TABLE IF NOT EXISTS digests (path TEXT PRIMARY KEY, stamp TEXT, sha256 TEXT)")
    return memory


def _recall(memory: sqlite3.Connection, path: Path) -> str | None:
    query = "SELECT sha256 FROM digests WHERE path = ? AND stamp = ?"
    row = memory.execute(query, (str(path.resolve()), _stamp(path))).fetchone()
    return row[0] if row else None


def _stamp(path: Path) -> str:
    stat = os.stat(path)
    return f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_dev}:{stat.st_ino}"
