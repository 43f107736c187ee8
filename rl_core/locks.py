"""Advisory file locks that die with their holder (flock): one writer per key, and "wait until the last rank is gone".

A descriptor opened by Python is closed in exec'd children, so a child never keeps its parent's lock. A *forked* child
would; nothing here forks without exec.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(
    path: Path, shared: bool = False, on_wait: Callable[[str], None] | None = None, poll_seconds: float = 0.2
) -> Iterator[None]:
    """Hold the lock on `path` (made where missing).

    Args:
        shared: many may hold it shared; an exclusive holder is alone.
        on_wait: called once with a description of the holder if it has to wait.
        poll_seconds: between tries; polling lets signals through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        said = False
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if on_wait is not None and not said:
                    on_wait(os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process")
                    said = True
                time.sleep(poll_seconds)
        if not shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        os.close(descriptor)
