"""Readers of DCP directories and of Hugging Face's safetensors that hold in memory no more than they copy at a time."""

from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from rl_core.checkpoint.metadata import read_metadata

PIECE_BYTES = 2**26
"""Rows of safetensors are copied in pieces of at most this size."""


class SafeReader(FileSystemReader):
    """Reads `.metadata` without running anything; the files from front to back, one stored piece in memory at a time (torch's own
    reader keeps the last one until it has the next)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        for name, items in groupby(sorted(plan.items, key=place), key=lambda item: place(item)[0]):
            with (Path(self.path) / name).open("rb") as file:
                for item in items:
                    self._read(file, item, planner)
        return _done()

    def _read(self, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> None:
        piece = torch.load(self._slice_file(file, self.storage_data[item.storage_index]), map_location="cpu", weights_only=True)
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(piece, item.storage_offsets, item.lengths).view(target.shape))
        planner.commit_tensor(item, target)


class SafetensorsReader(HuggingFaceStorageReader):
    """Opens a file for each piece: what has been read of a mapped file counts as the process's memory until it is closed, so that
    a rank would hold all that it needs twice."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            step = max(1, PIECE_BYTES // max(1, target[:1].nbytes)) if target.dim() else 1
            for start in range(0, len(target) if target.dim() else 1, step):
                with safe_open(self.storage_data[item.storage_index].relative_path, framework="pt") as file:
                    _copy_rows(file, item, target, start, step)
            planner.commit_tensor(item, target)
        return _done()


def _copy_rows(file: Any, item: ReadItem, target: Tensor, start: int, count: int) -> None:
    """Copy `count` rows from `start` on (or fewer, at the end) of what `item` names; all of a scalar."""
    name = item.storage_index.fqn
    if not target.dim():
        target.copy_(file.get_tensor(name))
        return
    rows, *others = [slice(offset, offset + length) for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
    piece = slice(rows.start + start, min(rows.start + start + count, rows.stop))
    target[start : start + count].copy_(file.get_slice(name)[(piece, *others)])


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
