"""Which checkpoints are deleted, decided by a scan of the disk: the newest stay, the best one, and any that somebody reads.

`in_use` is how a reader says so: a shared lock on the directory itself, which dies with its holder.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_core.artifacts import Artifact, open_artifact, scratch_of, set_aside
from rl_core.errors import BrokenArtifact, StoreError

log = logging.getLogger(__name__)

LEAST = 2
"""Never fewer whole ones are left: the newest could be damaged."""


def steps_in(directory: Path) -> list[int]:
    """Steps that have a directory, in ascending order; whether it is whole is not looked at."""
    if not directory.is_dir():
        return []
    names = (path.name.removeprefix("step_") for path in directory.glob("step_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return directory / f"step_{step:06d}"


def rotate(directory: Path, keep: int, best: str | None) -> None:
    """Delete what is too old. To be called after a commit only.

    Args:
        keep: newest whole ones that stay; two at least.
        best: the metric whose highest value makes a checkpoint stay however old it is; None: no such one.
    """
    whole = [artifact for step in steps_in(directory) if (artifact := whole_or_aside(step_path(directory, step))) is not None]
    for artifact in _too_old(whole, max(keep, LEAST), best):
        if not _taken(artifact.path):
            # Renamed first: a checkpoint that is half deleted must not look like a broken one.
            doomed = scratch_of(artifact.path)
            artifact.path.rename(doomed)
            shutil.rmtree(doomed)
    _remove_broken(directory)


def whole_or_aside(path: Path) -> Artifact | None:
    """The checkpoint if it is what its manifest says; a broken one is set aside with a warning."""
    try:
        return open_artifact(path)
    except BrokenArtifact as error:
        aside = set_aside(path)
        log.warning("%s It was set aside as %s and an earlier checkpoint is used.", error, aside.name)
        return None


def broken_in(directory: Path) -> list[Path]:
    """What was set aside, the latest last."""
    return sorted(directory.glob(".step_*.broken-*"), key=_step_and_number)


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """While the block runs no rotation deletes this checkpoint, whichever process rotates.

    Raises:
        StoreError: it is gone already.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StoreError(f"{path} is not there (any more): {error.strerror}. Take a newer checkpoint of the run.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _taken(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True  # the next rotation finds it free
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(descriptor)
    return False


def _too_old(whole: list[Artifact], keep: int, best: str | None) -> list[Artifact]:
    older = whole[:-keep]
    rated = [artifact for artifact in whole if best in artifact.results.get("metrics", {})]
    if best is None or not rated:
        return older
    first = max(rated, key=lambda artifact: artifact.results["metrics"][best])  # of equal ones the earliest
    return [artifact for artifact in older if artifact is not first]


def _remove_broken(directory: Path) -> None:
    """Of those set aside the latest is kept, to look into, until it is older than the newest two: each is gigabytes."""
    broken = broken_in(directory)
    oldest = steps_in(directory)[-LEAST:][0]
    for path in broken:
        if path is not broken[-1] or _step_and_number(path)[0] < oldest:
            shutil.rmtree(path)


def _step_and_number(aside: Path) -> tuple[int, int]:
    """Of a directory's name that `set_aside` made: `.step_000010.broken-0`."""
    _, step, number = aside.name.split(".")
    return int(step.removeprefix("step_")), int(number.removeprefix("broken-"))
