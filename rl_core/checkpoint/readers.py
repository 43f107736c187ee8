"""Readers of DCP directories and of Hugging Face's safetensors, without trust and without more memory than they must have."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from rl_core.checkpoint.metadata import read_metadata
from rl_core.errors import ModelError

PIECE_BYTES = 2**26
"""Rows of safetensors are copied in pieces of at most this size."""


class SafeReader(FileSystemReader):
    """Reads `.metadata` without running anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


class SafetensorsReader(HuggingFaceStorageReader):
    """Opens a file for each piece: what has been read of a mapped file counts as the process's memory until it is closed, so that
    a rank would hold all that it needs twice."""

    def read_metadata(self) -> Metadata:
        try:
            return super().read_metadata()
        except SafetensorError as error:
            raise ModelError(f"{self.path}: a safetensors file in it is damaged ({error}). Bring the model again.") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            step = max(1, PIECE_BYTES // max(1, target[:1].nbytes)) if target.dim() else 1
            for start in range(0, len(target) if target.dim() else 1, step):
                with safe_open(self.storage_data[item.storage_index].relative_path, framework="pt") as file:
                    _copy_rows(file, item, target, start, step)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _copy_rows(file: Any, item: ReadItem, target: Tensor, start: int, count: int) -> None:
    """Copy `count` rows from `start` on (or fewer, at the end) of what `item` names; all of a scalar."""
    name = item.storage_index.fqn
    if not target.dim():
        target.copy_(file.get_tensor(name))
        return
    rows, *others = [slice(offset, offset + length) for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
    piece = slice(rows.start + start, min(rows.start + start + count, rows.stop))
    target[start : start + count].copy_(file.get_slice(name)[(piece, *others)])
