"""Saves a checkpoint while the training goes on: one thread a rank copies the tensors to host memory, writes them and commits.

    saver.begin(step, tensors, state, key)   # returns at once; waits for the save before, if that is not done
    …rollout, rewards, log-probabilities…
    saver.wait_for_copy()                    # before the first change of the tensors in place
    …update…
    saver.wait()                             # raises what the save raised; before the end, and by `begin`

The thread runs `Checkpoints.save` as it is, over a process group of its own, so that what is written has the same bits as if the
training had waited, and is committed when all ranks are done.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_core.checkpoint.steps import Checkpoints
from rl_core.models.local import local

Copy = Callable[[], None]
LAST_SECONDS = 300.0
"""A save whose training has failed may take so long; where a rank is dead the others' saves end by themselves."""


class Saver:
    """At most one save at a time. `begin` and `wait` are collective.

    Args:
        checkpoints: with a process group that nobody else uses, where `background`.
        background: else `begin` returns when the checkpoint is committed, and there is no copy in host memory.
    """

    def __init__(self, checkpoints: Checkpoints, background: bool) -> None:
        self._checkpoints, self._background = checkpoints, background
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None
        self._lost = 0.0
        self.longest = 0.0
        """Seconds of the longest save so far, from beginning to commit."""

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        key: str,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save `tensors` as they are now, see `Checkpoints.save`.

        Raises:
            StoreError: the save before this one failed, or (not in the background) this one.
        """
        self.wait()
        with self._losing_time():
            if not self._background:
                self._save(step, dict(tensors), state, key, metrics)
                return
            copies, copy = host_copy(tensors)
            self._copied = threading.Event()

            def work() -> None:
                try:
                    copy()
                    self._copied.set()
                    self._save(step, copies, state, key, metrics)
                except BaseException as error:  # noqa: BLE001 – raised in the main thread, by `wait`
                    self._error = error
                finally:
                    self._copied.set()

            self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)  # a rank that fails waits for nothing
            self._thread.start()

    def wait_for_copy(self) -> None:
        """Return when the tensors given to `begin` may be changed."""
        if self._thread is not None:
            with self._losing_time():
                self._copied.wait()

    def wait(self) -> None:
        """Return when nothing is being saved any more.

        Raises:
            StoreError: on all ranks, if the save failed on one.
        """
        if self._thread is None:
            return
        with self._losing_time():
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def let_finish(self) -> None:
        """Before the process ends for another reason: give a save that has begun the time that it needs, within limits."""
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    @property
    def failed(self) -> bool:
        """Whether this rank's save has failed and `wait` would say so."""
        return self._error is not None

    def lost_seconds(self) -> float:
        """For how long the training has waited for saves since this was last asked."""
        lost, self._lost = self._lost, 0.0
        return lost

    def _save(self, *what: Any) -> None:
        began = time.monotonic()
        self._checkpoints.save(*what)
        self.longest = max(self.longest, time.monotonic() - began)

    @contextmanager
    def _losing_time(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._lost += time.monotonic() - began


def host_copy(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Copy]:
    """Tensors in host memory, sharded alike and still empty, and what fills them.

    What is copied are this rank's shards as they are after all work of the current stream. `Copy` may be called in another
    thread; on a GPU it copies beside the work that is queued later.
    """
    with torch.no_grad():
        copies = {name: torch.empty_like(tensor.detach(), device="cpu") for name, tensor in tensors.items()}
        pairs = [(local(copies[name]), local(tensor.detach())) for name, tensor in tensors.items()]
    gpu = next((source.device for _, source in pairs if source.is_cuda), None)
    if gpu is None:
        return copies, lambda: _copy(pairs)
    ready = torch.cuda.current_stream(gpu).record_event()

    def copy() -> None:
        stream = torch.cuda.Stream(gpu)
        with torch.cuda.stream(stream):  # which also makes it this thread's device
            stream.wait_event(ready)
            _copy(pairs)
            stream.synchronize()

    return copies, copy


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    while pairs:
        target, source = pairs.pop()  # what was offloaded meanwhile is held by this list alone
        target.copy_(source)
