"""What lies in the store and in the run directories: artifacts, runs, and what dead writers left. Files are not verified here."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.artifacts import read_manifest
from rl_core.errors import BrokenArtifact
from rl_core.home import home
from tasks.status import held, runs

RUN = "run"
"""The `stage` of a run directory, and of what was left in one."""
LEFT = re.compile(r"\.(.+)\.(partial|broken-\d+)")
"""Names of what was never committed, and of what was set aside (`rl_core.artifacts`)."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A directory (rarely a file) that takes room."""

    stage: str
    key: str
    state: str
    """Of an artifact `committed` or `damaged`; of a run `running`, `stopped`, `finished` or `replaced` (by a `--fresh` one that
    is not finished); else `being made`, `unfinished` (its writer is dead) or `set aside`."""
    bytes: int
    """On disk; what has several names in it counts once."""
    idle_s: float
    """Seconds since it was last used or written."""
    path: Path
    locks: tuple[Path, ...]
    """Who deletes it holds these."""
    digest: str = ""
    components: dict[str, Any] = field(default_factory=dict)
    """Of the key."""

    @property
    def name(self) -> str:
        """`<stage>/<key>`."""
        return f"{self.stage}/{self.key}"


def artifacts() -> list[Item]:
    """The committed artifacts of the store."""
    items = []
    for path in sorted((home() / "store").glob("[!.]*/[!.]*")):
        try:
            manifest = read_manifest(path)
            state, digest, components = "committed", manifest["digest"], manifest["components"]
        except BrokenArtifact:
            if not path.is_dir():
                continue
            state, digest, components = "damaged", "", {}
        items.append(
            Item(
                stage=path.parent.name,
                key=path.name,
                state=state,
                bytes=size([path]),
                idle_s=_idle(path),
                path=path,
                locks=(_lock(path.parent, path.name),),
                digest=digest,
                components=components,
            )
        )
    return items


def run_directories() -> list[Item]:
    """The trainings."""
    replaced = [
        Item(
            stage=RUN,
            key=path.name[1:].partition(".")[0],
            state="replaced",
            bytes=size([path]),
            idle_s=_idle(path),
            path=path,
            locks=_run_locks(path),
        )
        for path in sorted((home() / "runs").glob(".*.replaced-*"))
    ]
    return replaced + [
        Item(
            stage=RUN,
            key=run.key,
            state=run.state,
            bytes=size([Path(run.path)]),
            idle_s=run.last_step_age_s if run.last_step_age_s is not None else _idle(Path(run.path)),
            path=Path(run.path),
            locks=_run_locks(Path(run.path)),
        )
        for run in runs()
    ]


def leavings() -> list[Item]:
    """What dead writers left and what was set aside: in the store, in run directories and among downloaded models."""
    stages = [path for path in (home() / "store").glob("[!.]*") if path.is_dir()]
    items = [item for folder in stages for item in _left(folder.name, folder)]
    items += _left(RUN, home() / "runs")
    items += _left("download", home() / "downloads" / "models")
    for run in (home() / "runs").glob("[!.]*"):
        for folder in (run, run / "checkpoints"):
            items += _left(RUN, folder, run.name, _run_locks(run))
    return items


def size(paths: Iterable[Path]) -> int:
    """Bytes on disk under some paths; a file with several names counts once."""
    return sum(bytes_ for bytes_, _, _ in _files(paths).values())


def freed(paths: Iterable[Path]) -> int:
    """Bytes that deleting some paths gives back: files that have further names elsewhere (MLflow's) do not count."""
    return sum(bytes_ for bytes_, names, links in _files(paths).values() if names == links)


def _files(paths: Iterable[Path]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """By inode: bytes, names found here, names that there are."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for path in paths:
        every = [path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names)]
        for file in every if path.is_dir() else [path]:
            try:
                stat = file.lstat()
            except OSError:  # taken away meanwhile
                continue
            links = 1 if file == path and path.is_dir() else stat.st_nlink
            _, names, _ = found.get((stat.st_dev, stat.st_ino), (0, 0, 0))
            found[stat.st_dev, stat.st_ino] = (stat.st_blocks * 512, names + 1, links)
    return found


def _left(stage: str, folder: Path, key: str | None = None, locks: tuple[Path, ...] = ()) -> Iterator[Item]:
    for path in sorted(folder.glob(".*")):
        match = LEFT.fullmatch(path.name)
        if match is None:
            continue
        mine = locks or (_lock(folder, match[1]),)
        made = any(held(lock, shared=lock.name == "ranks.lock") for lock in mine)
        state = "set aside" if match[2] != "partial" else "being made" if made else "unfinished"
        yield Item(
            stage=stage,
            key=key or match[1],
            state=state,
            bytes=size([path]),
            idle_s=_idle(path),
            path=path,
            locks=mine,
        )


def _lock(folder: Path, key: str) -> Path:
    return folder / f".{key}.lock"


def _run_locks(run: Path) -> tuple[Path, ...]:
    """Of the flow, of the ranks, and of a training that was started by hand."""
    return _lock(run.parent, run.name), run / "ranks.lock", run / "training.lock"


def _idle(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0
