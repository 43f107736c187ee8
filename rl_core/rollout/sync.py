"""Weights of the trained policy → the rollout engine's own copy."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.errors import ModelError
from rl_core.models.lora import adapted_layers, is_adapter, merged, plain_name
from rl_core.rollout.engine import RolloutEngine


@torch.no_grad()
def sync_weights(policy: Any, engine: RolloutEngine) -> None:
    """Copy all weights of `policy.model` into the engine, adapters merged; collective where they are sharded, so every rank that
    holds the policy calls it.

    One tensor at a time is gathered whole: beyond the copy itself, the memory needed is that of the largest tensor, in the
    engine's type (of an adapted weight twice in float32). The engine's tensors stay where they are in memory. Tied weights are
    copied once.

    Args:
        policy: has the transformers module as `.model`; its parameters may be FSDP2 DTensors, on another device too.
        engine: receives the weights.

    Raises:
        ModelError: the two modules have not the same weights; nothing has been copied then.
    """
    weights = {plain_name(name): tensor for name, tensor in policy.model.state_dict().items()}
    source = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    adapted = {f"{plain_name(name)}.weight": layer for name, layer in adapted_layers(policy.model).items()}
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
        weight = source[name]
        if name in adapted:
            layer = name.removesuffix(".weight")
            parts = [weight, weights[f"{layer}.lora_A.weight"], weights[f"{layer}.lora_B.weight"]]
            base, lora_a, lora_b = (_whole(part.to(whole.device)) for part in parts)
            [scaling] = adapted[name].scaling.values()
            whole.copy_(merged(base, lora_a, lora_b, scaling, transposed=adapted[name].fan_in_fan_out))
        else:
            whole.copy_(_whole(weight.to(device=whole.device, dtype=whole.dtype)))
    engine.synced = True


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
