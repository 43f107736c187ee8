"""How much disk checkpoints take, and whether there is as much: asked before a run and before each save."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from rl_core.errors import StoreError
from rl_core.models.tensors import model_tensors, trained_tensors
from rl_core.optimizers import MOMENTS, AdamW8bit

if TYPE_CHECKING:
    from rl_core.learner import Learner

MARGIN = 1.02
"""For containers, state and manifest beside the tensors."""


def stored_bytes(tensors: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None) -> int:
    """Bytes of all ranks' tensors together, each counted once. Collective where torch.distributed is initialised."""
    return _over_ranks({name: tensor.nbytes for name, tensor in tensors.items()}, process_group)  # of a DTensor: all of it


def learned_bytes(learners: Iterable["Learner"]) -> int:
    """What `stored_bytes` of their weights and moments will be, before there are moments. Collective, as that is."""
    own = {}
    for learner in learners:
        if learner.module is not None:
            for name, tensor in trained_tensors(learner.module).items():
                moment = 4 * tensor.numel() if isinstance(learner.optimizer, AdamW8bit) else tensor.nbytes
                own[f"{learner.name}.{name}"] = tensor.nbytes + tensor.requires_grad * len(MOMENTS) * moment
    return _over_ranks(own, None)


def policy_bytes(actor: "Learner") -> int:
    """About what the exported policy takes. Collective, as `stored_bytes` is."""
    return stored_bytes({} if actor.module is None else model_tensors(actor.module))


def _over_ranks(own: dict[str, int], process_group: dist.ProcessGroup | None) -> int:
    parts = [own]
    if dist.is_initialized():
        parts = [own] * dist.get_world_size(process_group)
        dist.all_gather_object(parts, own, group=process_group)
    return int(MARGIN * sum({name: size for part in parts for name, size in part.items()}.values()))


def at_once(keep: int, present: int, coming: int) -> int:
    """How many more checkpoints there will be on the disk at the same time: rotation follows the commit.

    Args:
        keep: how many are kept.
        present: how many there are.
        coming: how many will be saved.
    """
    return max(0, min(keep + 1, present + coming) - present)


def check_room(directory: Path, needed: int, what: str) -> None:
    """Raises StoreError where the disk of `directory` (or of what of it exists) has fewer than `needed` bytes free."""
    there = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise StoreError(
            f"{what} of {needed / 1e9:.3g} GB does not fit: the disk of {directory} has {free / 1e9:.3g} GB free. Free some "
            "space, lower checkpoint.keep, or move PPOFLOW_HOME to a larger disk; running again goes on from the last checkpoint."
        )
