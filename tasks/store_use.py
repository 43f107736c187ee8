"""Which live processes use which artifacts of the store: `ppoflow store gc` leaves those alone.

Each process has a file `store/.users/<random>` that it holds locked until it ends, however it ends: its name in the first line,
below it what it uses (`<stage>/<key>`). Who adds a line holds `store/.gc.lock` shared, and who collects holds it exclusively: so
an artifact is either seen to be used or gone before it is opened.
"""

import atexit
import logging
import os
import threading
import uuid
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache
from pathlib import Path

from rl_core.errors import StoreError
from rl_core.locks import locked, tried

logger = logging.getLogger(__name__)

_threads = threading.Lock()
_registers: dict[Path, "_Register"] = {}
"""This process's, by store."""


def use(artifact: Path) -> None:
    """This process uses `store/<stage>/<key>` from now on until it ends. To be called before the artifact is looked at.

    Best effort: where nothing can be written (a full disk) the work goes on without.
    """
    store, name = artifact.parents[1], f"{artifact.parent.name}/{artifact.name}"
    with _threads:
        register = _registers.get(store)
        if register is None or not register.file.exists():  # the store was deleted, or moved
            register = _registers[store] = _Register(store)
        if name in register.names:
            return
        try:
            with _waiting(store, shared=True):
                register.add(name)
        except (OSError, StoreError) as error:
            _warn(str(error))
    with suppress(OSError):  # not there yet, or read-only
        os.utime(artifact)  # when it was last used


def collecting(store: Path) -> AbstractContextManager[None]:
    """Held by who deletes from the store: while it is held nobody begins to use an artifact."""
    return _waiting(store, shared=False)


def users(store: Path, forget_dead: bool = False) -> dict[str, list[str]]:
    """`<stage>/<key>` → the processes that use it.

    Args:
        forget_dead: remove the files of processes that have ended; only inside `collecting`.
    """
    found: dict[str, list[str]] = {}
    for file in sorted((store / ".users").glob("*")):
        with suppress(OSError):
            holder, *names = file.read_text(encoding="utf-8").splitlines() or [""]
            with tried(file) as dead:
                if dead and forget_dead:
                    file.unlink()
            if not dead:
                for name in names:
                    found.setdefault(name, []).append(holder)
    return found


class _Register:
    """The file of this process."""

    def __init__(self, store: Path) -> None:
        self.file = store / ".users" / uuid.uuid4().hex
        self.names: set[str] = set()
        self.stack = ExitStack()

    def add(self, name: str) -> None:
        if not self.names:
            self.stack.enter_context(locked(self.file, shared=True))
            self.file.write_text(f"process {os.getpid()} on {os.uname().nodename}\n", encoding="utf-8")
            atexit.register(self.close)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        self.names.add(name)

    def close(self) -> None:
        with suppress(OSError):  # whoever collects deletes it
            self.file.unlink()
        self.stack.close()


def _waiting(store: Path, shared: bool) -> AbstractContextManager[None]:
    return locked(
        store / ".gc.lock", shared, on_wait=lambda holder: logger.info("The list of the store's users is held by %s", holder)
    )


@cache
def _warn(reason: str) -> None:
    """Once per reason."""
    logger.warning("What this process uses cannot be noted, so do not run `ppoflow store gc` beside it: %s", reason)
