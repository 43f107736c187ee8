"""Where ppoflow writes: one directory, `PPOFLOW_HOME`, to look at, move or delete."""

import os
from pathlib import Path

from rl_core.errors import StoreError


def home() -> Path:
    """The absolute path of `PPOFLOW_HOME` (default `./.ppoflow`)."""
    return Path(os.environ.get("PPOFLOW_HOME") or ".ppoflow").absolute()


def writable(directory: Path) -> Path:
    """Make `directory` and return it.

    Raises:
        StoreError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"PPOFLOW_HOME: {directory} cannot be written ({error.strerror}). Set PPOFLOW_HOME to a directory that you own."
        ) from None
    return directory
