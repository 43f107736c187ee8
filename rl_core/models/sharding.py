"""FSDP2 wrapping: which modules become units, in which types they compute, and proof that they are sharded."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_core.config.schema import Config
from rl_core.errors import ConfigError
from rl_core.models.value import ValueModel


@dataclass(frozen=True)
class ShardReport:
    """What the wrapping came to, as seen from this rank."""

    units: int
    parameters: int
    local_parameters: int
    local_bytes: int

    def __str__(self) -> str:
        share = self.local_parameters / max(self.parameters, 1)
        return (
            f"{self.units} FSDP units, {self.parameters:,} parameters, {self.local_parameters:,} of them "
            f"({share:.1%}, {self.local_bytes / 2**20:,.1f} MiB) on this rank"
        )


def unit_classes(model: nn.Module, wanted: list[str] | None) -> set[str]:
    """Names of the classes of which each instance becomes a unit.

    Args:
        model: the transformers model.
        wanted: `fsdp.fsdp_transformer_layer_cls_to_wrap`; None takes the model's own `_no_split_modules`.

    Raises:
        ConfigError: a wanted class does not occur in the model, or the model names none itself.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    candidates = sorted({type(layer).__name__ for layers in lists for layer in layers})
    present = {type(module).__name__ for module in model.modules()}
    remedy = f"Set it to one or more of: {', '.join(candidates) or ', '.join(sorted(present))}."
    if wanted is not None:
        if absent := [name for name in wanted if name not in present]:
            raise ConfigError(
                f"fsdp.fsdp_transformer_layer_cls_to_wrap: {', '.join(absent)} does not occur in {type(model).__name__}. {remedy}"
            )
        return set(wanted)
    found = set(getattr(model, "_no_split_modules", None) or ()) & present
    if not found:
        raise ConfigError(
            f"fsdp.fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} does not say which of its layers to shard. {remedy}"
        )
    return found


def shard(module: nn.Module, classes: set[str], config: Config, mesh: DeviceMesh) -> ShardReport:
    """Make each layer of `classes`, a value head and `module` itself FSDP2 units, in place.

    Parameters stay in their type (float32 masters); a unit computes in `model.torch_dtype`, gradients are reduced in
    `fsdp.reduce_dtype`. A value head always computes in float32.
    """
    compute = getattr(torch, config.model.torch_dtype)
    policy = partial(
        MixedPrecisionPolicy,
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=getattr(torch, config.fsdp.reduce_dtype),
    )
    wrap = partial(fully_shard, mesh=mesh, reshard_after_forward=config.fsdp.reshard_after_forward)
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child).__name__ in classes
    ]
    for parent, name in reversed(places):  # inner ones first where classes nest
        if config.fsdp.activation_checkpointing:
            setattr(parent, name, checkpoint_wrapper(getattr(parent, name), preserve_rng_state=False))
        wrap(getattr(parent, name), mp_policy=policy())
    if isinstance(module, ValueModel):
        wrap(module.value_head, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    wrap(module, mp_policy=policy(output_dtype=torch.float32))
    return _report(module, len(places) + 1 + isinstance(module, ValueModel), mesh.size())


def _report(module: nn.Module, units: int, world: int) -> ShardReport:
    total = local = size = bound = 0
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        shard_ = parameter.to_local()
        total, local, size = total + parameter.numel(), local + shard_.numel(), size + shard_.numel() * shard_.element_size()
        rows = parameter.shape[0] if parameter.dim() else 1
        bound += math.ceil(rows / world) * (parameter.numel() // max(rows, 1))
    assert local <= bound, f"{local} of {total} parameters on one of {world} ranks, at most {bound} expected"
    return ShardReport(units, total, local, size)
