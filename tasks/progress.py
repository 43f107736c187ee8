"""Following a training by its `metrics.jsonl`, in a thread of its own: whoever is told, the training never waits for it."""

import contextvars
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from rl_core.errors import Interrupted
from tasks.tracking import Metrics, Status

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
UPDATE_SECONDS = 5.0
END_SECONDS = 60.0
"""Longest wait for listeners once the training has ended; a tenth of it when it was stopped, since Prefect then kills."""


class Listener(Protocol):
    """Who is told of each step."""

    def log_step(self, step: int, metrics: Metrics) -> None:
        """A step, counted from 0, is done. Told again with other metrics where a resumed training made it again."""

    def finish(self, status: Status) -> None:
        """The training has ended."""


@contextmanager
def following(path: Path, listeners: Sequence[Listener]) -> Iterator[None]:
    """While the block runs, tell the listeners of every whole line of `path`, and then how the block ended.

    What a listener raises is warned about once.
    """
    ended = threading.Event()
    status: list[Status] = ["FINISHED"]
    troubled: set[int] = set()

    def tell(listener: Listener, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever one of them has, the others and the training go on
            if id(listener) not in troubled:
                troubled.add(id(listener))
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                logger.warning("%s cannot follow the training (%s), which goes on.", type(listener).__name__, reason)

    def follow() -> None:
        reader = _Lines(path)
        while True:
            last = ended.wait(POLL_SECONDS)  # asked before reading, so that the last lines are read
            for row in reader.rows():
                step = row.pop("step")
                for listener in listeners:
                    tell(listener, partial(listener.log_step, step, row))
            if last:
                break
        for listener in listeners:
            tell(listener, partial(listener.finish, status[0]))

    # The context tells Prefect which run the thread works for; a daemon does not keep a killed flow waiting.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), name="follower", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        status[0] = "FAILED" if isinstance(error, Exception) and not isinstance(error, Interrupted) else "KILLED"
        raise
    finally:
        ended.set()
        thread.join(END_SECONDS if status[0] == "FINISHED" else END_SECONDS / 10)


class _Lines:
    """Reads a growing file of JSON lines. A resumed training first replaces it by one without the steps that it makes again."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.inode = path, 0, 0
        self.seen: dict[int, int] = {}
        """Of each step, the hash of its line: the file may have to be read again from its start."""

    def rows(self) -> list[dict[str, Any]]:
        """The steps that are new, or other than they were, since the last call."""
        try:
            with self.path.open("rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self.inode or now.st_size < self.offset:
                    self.offset, self.inode = 0, now.st_ino
                file.seek(self.offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self.offset += len(whole) + len(newline)
        return [row for line in whole.splitlines() if (row := self._news(line)) is not None]

    def _news(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError):
            self.offset = 0  # read while it was written: next time it is whole
            return None
        if self.seen.get(step) == hash(line):
            return None
        self.seen[step] = hash(line)
        return row


class Progress:
    """The progress bar on the flow run's page in Prefect. Best effort: nothing outside a run, a server's errors are logged."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._shown_at = steps, 0, float("-inf")
        self._artifact: UUID | None = None

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Move the bar, at most every few seconds."""
        self._done = step + 1
        if time.monotonic() - self._shown_at >= UPDATE_SECONDS:
            self._show()

    def finish(self, status: Status) -> None:
        """Show where it ended."""
        self._show()

    def _show(self) -> None:
        import httpx
        from prefect.artifacts import create_progress_artifact, update_progress_artifact
        from prefect.context import FlowRunContext
        from prefect.exceptions import PrefectException

        if FlowRunContext.get() is None:
            return
        self._shown_at = time.monotonic()
        percent = 100.0 * self._done / self._steps
        try:
            if self._artifact is None:
                created = create_progress_artifact(percent, key="training", description=f"Training: {self._steps} PPO steps")
                assert isinstance(created, UUID)
                self._artifact = created
            else:
                update_progress_artifact(self._artifact, percent)
        except (httpx.HTTPError, PrefectException) as error:
            logger.debug("Prefect did not take the progress: %s", error)
