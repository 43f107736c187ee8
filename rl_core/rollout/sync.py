"""Weights of the trained policy → the rollout engine's own copy."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.errors import ModelError
from rl_core.rollout.engine import RolloutEngine


@torch.no_grad()
def sync_weights(policy: Any, engine: RolloutEngine) -> None:
    """Copy all weights of `policy.model` into the engine; collective where they are sharded, so every rank calls it.

    One tensor at a time is gathered whole and in the engine's type: beyond the copy itself, the memory needed is that of the
    largest tensor. The engine's tensors stay where they are in memory. Tied weights are copied once.

    Args:
        policy: has the transformers module as `.model`; its parameters may be FSDP2 DTensors, on another device too.
        engine: receives the weights.

    Raises:
        ModelError: the two modules have not the same weights; nothing has been copied then.
    """
    source: dict[str, Tensor] = policy.model.state_dict()
    target: dict[str, Tensor] = engine.model.state_dict()
    differing = sorted(source.keys() ^ target.keys()) or sorted(
        name for name in source if source[name].shape != target[name].shape
    )
    if differing:
        raise ModelError(
            f"The policy's weights do not fit the rollout model: {len(differing)} of {len(target)} differ in name or shape, "
            f"first {', '.join(differing[:10])}. The policy was not built from the config.json of the rollout's base model."
        )
    copied: set[int] = set()
    for name, whole in target.items():
        if whole.data_ptr() in copied:
            continue
        copied.add(whole.data_ptr())
        weight = source[name].detach().to(device=whole.device, dtype=whole.dtype)
        whole.copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)
    engine.synced = True
