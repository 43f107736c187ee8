"""Advisory file locks that die with their holder (flock): one writer per key, and "wait until the last rank is gone".

They hold between hosts that share a file system with locks (NFS 4 has them). A descriptor opened by Python is closed in
exec'd children, so a child never keeps its parent's lock. A *forked* child would; nothing here forks without exec.

A holder that is stopped (SIGSTOP, Ctrl-Z) or hangs keeps its lock. It is told from one that works by the time stamp of the
lock file, which a thread of the holder renews: that needs neither the holder's host nor equal clocks.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_core.errors import StoreError

BEAT_SECONDS = 5.0
"""Between two signs of life of a holder."""
SILENT_SECONDS = 60.0
"""Without a sign of life a holder is said to be stopped; more than the time for which NFS may show old stamps."""


@contextmanager
def locked(
    path: Path,
    shared: bool = False,
    on_wait: Callable[[str], None] | None = None,
    poll_seconds: float = 0.2,
    silent_seconds: float = SILENT_SECONDS,
) -> Iterator[None]:
    """Hold the lock on `path` (made where missing).

    Args:
        shared: many may hold it shared; an exclusive holder is alone.
        on_wait: called once with a description of the holder if it has to wait, and once more, with what to do, if that holder
            gives no sign of life for `silent_seconds`.
        poll_seconds: between tries; polling lets signals through.
        silent_seconds: see `on_wait`.

    Raises:
        StoreError: the file cannot be made, or its file system has no locks.
    """
    descriptor = _acquired(path, shared, _Waiting(on_wait, silent_seconds, poll_seconds))
    try:
        os.ftruncate(descriptor, 0)  # who held it before does not hold it now
        if shared:
            yield
        else:
            with _signing(descriptor):
                yield
    finally:
        os.close(descriptor)


@contextmanager
def tried(path: Path) -> Iterator[bool]:
    """Hold the lock exclusively if nobody else holds it; the value is whether it is held now. The holder may delete the file."""
    try:
        descriptor = _acquired(path, False, None)
    except BlockingIOError:
        yield False
        return
    try:
        with _signing(descriptor):
            yield True
    finally:
        os.close(descriptor)


class _Waiting:
    """What one who waits says, and when: first who holds the lock, then that this one is silent."""

    def __init__(self, on_wait: Callable[[str], None] | None, silent_seconds: float, poll_seconds: float) -> None:
        self.on_wait, self.silent_seconds, self.poll_seconds = on_wait, silent_seconds, poll_seconds
        self.said = self.said_silent = False
        self.sign: tuple[bytes, int] | None = None
        self.since = 0.0

    def look(self, descriptor: int) -> None:
        """At the holder, then wait a little."""
        holder = os.pread(descriptor, 200, 0)
        sign = (holder, os.fstat(descriptor).st_mtime_ns)
        if sign != self.sign:
            self.sign, self.since, self.said_silent = sign, time.monotonic(), False
        name = holder.decode(errors="replace").strip()
        if self.on_wait is not None and not self.said:
            self.on_wait(name or "another process")
            self.said = True
        silent = time.monotonic() - self.since
        if self.on_wait is not None and name and not self.said_silent and silent >= self.silent_seconds:
            self.on_wait(f"{name} (no sign of life for {silent:.0f} s: stopped or hanging{_remedy(name)})")
            self.said_silent = True
        time.sleep(self.poll_seconds)


def _remedy(holder: str) -> str:
    number = re.match(r"process (\d+) on ", holder)
    if number is None:
        return ""
    return f"; on that host `kill -CONT {number[1]}` lets it go on and `kill -KILL {number[1]}` frees the lock"


def _acquired(path: Path, shared: bool, waiting: _Waiting | None) -> int:
    """A descriptor that holds the lock.

    Raises:
        BlockingIOError: somebody holds it and this one does not wait.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(
                f"The lock {path} cannot be made ({error.strerror}). Set PPOFLOW_HOME to a directory that you own."
            ) from None
        try:
            _hold(descriptor, path, shared, waiting)
            if _is(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # deleted by its last holder; who comes next makes another


def _hold(descriptor: int, path: Path, shared: bool, waiting: _Waiting | None) -> None:
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if waiting is None:
                raise
            waiting.look(descriptor)
        except OSError as error:
            raise StoreError(
                f"{path}: its file system has no locks ({error.strerror}), so two processes could write the same. Mount it with "
                "locks (flock), or set PPOFLOW_HOME to a directory elsewhere."
            ) from None


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _signing(descriptor: int) -> Iterator[None]:
    """Write who holds the lock, and renew the time stamp from a thread, until the block ends."""
    os.ftruncate(descriptor, 0)
    with suppress(OSError):  # a full disk: then the holder has no name
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # the descriptor's number may be another file's afterwards
