"""The decoding on a GPU: the model's repeated layer compiled once, and whole steps captured in CUDA graphs.

A graph is captured for each number of rows (see `size`) when it is wanted, after two ordinary steps. It knows addresses, no
values: weights may be copied into, rows may change. What the compiler made is kept on disk for later runs.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.home import home
from rl_core.rollout.requests import Requests
from rl_core.rollout.runner import Runner
from rl_core.rollout.sampling import draw
from rl_core.rollout.slots import Slots, advance

log = logging.getLogger(__name__)

_KERNELS_WIDTHS = (16, 32, 64, 128, 256)


class GraphRunner(Runner):
    """Runs the steps as CUDA graphs."""

    captures = True
    steps = 8

    def __init__(self, model: nn.Module, width: int, compiled: bool = True) -> None:
        """For a model on a GPU whose heads have `width` elements.

        Args:
            compiled: whether its layers are compiled.
        """
        dtype = next(model.parameters()).dtype
        self._kernels = _kernels() if width in _KERNELS_WIDTHS and dtype in (torch.float16, torch.bfloat16) else None
        self.kernels = self._kernels is not None
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._calls: dict[tuple[Any, ...], int] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._scale = torch.ones((), device="cuda")
        self.seconds = 0.0
        """Spent on compiling and capturing."""
        compiled = compiled and self.kernels  # elsewhere each set of packed prompts would be compiled anew
        self._blocks = _repeated(model) if compiled else []
        self._finish: Callable[..., None] = _finish
        self._advance: Callable[..., None] = partial(_advance, self._kernels)
        if compiled:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / "downloads" / "compiled"))
            # For any number of rows: code for one was not faster on an H200, and would be compiled anew with the cache's size.
            self._forward: Any = torch.compile(type(self._blocks[0]).forward, dynamic=True) if self._blocks else None
            self._finish, self._advance = (torch.compile(made, dynamic=True) for made in (self._finish, self._advance))

    def begin(self, requests: Requests) -> None:
        super().begin(requests)
        self._scale.fill_(self._temperature or 1.0)

    def size(self, rows: int) -> int:
        """The next of 8, 16, 32, 64, 96, 128, 192, 256, 384, … rows."""
        size = 8
        while size < rows:
            if size >= 64 and size + size // 2 >= rows:
                return size + size // 2
            size *= 2
        return size

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the model's layers are the compiled ones; what cannot be compiled runs as it is, with a warning."""
        for block in self._blocks:
            vars(block)["forward"] = partial(self._forward, block)
        try:
            with torch._dynamo.config.patch(suppress_errors=True):
                yield
        finally:
            for block in self._blocks:
                del vars(block)["forward"]

    def prefill(self, forward: Callable[[], Any]) -> None:
        self._first("prefill", forward)

    def run(self, rows: int, step: Callable[[], None]) -> None:
        key = rows, self._temperature is None, self._temperature == 1, self._top_k, self._top_p
        if key in self._graphs:
            self._graphs[key].replay()
            return
        if self._calls.get(key, 0) < 2:
            self._first(key, step)
        else:
            self._graphs[key] = self._captured(step)
            self._graphs[key].replay()

    def finish(self, logits: Tensor, slots: Slots) -> None:
        filtered = self._temperature is not None and (self._top_k or self._top_p < 1)
        if self._kernels is None or filtered:
            temperature = None if self._temperature is None else self._scale
            self._finish(logits, slots, temperature, self._top_k, self._top_p)
        else:
            greedy = self._temperature is None
            self._advance(
                slots, *self._kernels.draw_chunks(logits, slots.keys, slots.produced, self._scale, greedy, self._temperature == 1)
            )

    def wait(self) -> None:
        torch.cuda.synchronize()

    def reset(self) -> None:
        self._graphs.clear()
        self._calls.clear()
        self._pool = torch.cuda.graph_pool_handle()  # that of the old graphs has gone with them

    def _first(self, key: Any, work: Callable[[], Any]) -> None:
        """Do something, and take the time if it is the first time, when it may have to be compiled."""
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] > 1:
            work()
            return
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        self.seconds += time.perf_counter() - began
        return graph


def _finish(logits: Tensor, slots: Slots, temperature: Tensor | None, top_k: int, top_p: float) -> None:
    finite = logits.isfinite().all(dim=1)
    token, logprob = draw(logits, slots.keys, slots.produced, temperature, top_k, top_p)
    advance(slots, token, logprob, finite)


def _advance(kernels: Any, slots: Slots, *chunks: Tensor) -> None:
    advance(slots, *kernels.draw_of(*chunks))


def _kernels() -> ModuleType | None:
    try:
        from rl_core.rollout import kernels
    except ImportError as error:
        log.warning("rollout: attention and sampling without the kernels for the GPU, hence slower (%s).", error)
        return None
    return kernels


def _repeated(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the modules of its longest list, if they are of one class."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest = max(lists, key=len, default=[])
    return longest if len({type(block) for block in longest}) == 1 else []
