"""FSDP2 wrapping: which modules become units, in which types they compute, and proof that they are sharded.

All strategies are one code path: the mesh says over how many ranks parameters are sharded and how many replicas there are
(`single` and `ddp` shard over one rank).
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_core.config.fsdp import FsdpConfig, WrapPolicyConfig
from rl_core.errors import ConfigError
from rl_core.models.offload import home_device, layer_runner
from rl_core.models.value import ValueModel

log = logging.getLogger(__name__)

SIZE_BASED_LEAST = 100_000_000
"""Parameters from which SIZE_BASED_WRAP makes a unit, where the configuration gives no number (as in torch and accelerate)."""
CLASSES, CHECKPOINTING = "fsdp.wrap_policy.transformer_layer_cls_to_wrap", "fsdp.activation_checkpointing"


@dataclass(frozen=True)
class ShardReport:
    """What the wrapping came to, as seen from this rank."""

    strategy: str
    replicas: int
    shards: int
    units: int
    parameters: int
    local_parameters: int
    local_bytes: int
    held: str
    """Types of the parameters at rest."""
    compute: str
    reduce: str

    def __str__(self) -> str:
        share, mebibytes = self.local_parameters / max(self.parameters, 1), self.local_bytes / 2**20
        return (
            f"{self.strategy} ({self.replicas} replica(s) × {self.shards} shard(s)), {self.units} FSDP unit(s), "
            f"{self.parameters:,} parameters, {self.local_parameters:,} of them ({share:.1%}, {mebibytes:,.1f} MiB) on this "
            f"rank; parameters {self.held}, compute {self.compute}, reduce {self.reduce}"
        )


def unit_classes(model: nn.Module, wrap_policy: WrapPolicyConfig) -> set[str]:
    """Names of the classes of the model's layers: the listed ones, or the model's own `_no_split_modules`.

    With TRANSFORMER_BASED_WRAP each instance becomes a unit. The other policies ignore the list, and take the layers for
    activation checkpointing and offload only; then the result may be empty.

    Args:
        model: the transformers model.

    Raises:
        ConfigError: a listed class is not one of a layer, or nothing says what the layers are.
    """
    possible = {type(module).__name__ for module in _possible_units(model)}
    by_class = wrap_policy.auto_wrap == "TRANSFORMER_BASED_WRAP"
    listed = by_class and wrap_policy.transformer_layer_cls_to_wrap
    found = set(listed or getattr(model, "_no_split_modules", None) or ())
    remedy = f"Set it to one or more of: {', '.join(sorted(_names(_listed(model)) & possible or possible))}."
    if listed and (unfit := sorted(found - possible)):
        there = {type(module).__name__ for module in model.modules()}
        reason = "shares its parameters or does not run once in each forward" if set(unfit) <= there else "does not occur"
        raise ConfigError(f"{CLASSES}: {', '.join(unfit)} {reason} in {type(model).__name__}. {remedy}")
    if by_class and not found & possible and not wrap_policy.min_num_params:
        raise ConfigError(f"{CLASSES}: {type(model).__name__} does not say which of its layers to shard. {remedy}")
    return found & possible


def shard(module: nn.Module, classes: set[str], settings: FsdpConfig, compute: torch.dtype, mesh: DeviceMesh) -> ShardReport:
    """Make layers, a value head and `module` itself FSDP2 units, in place.

    Parameters stay in their type (the master weights). A unit computes in `compute`, and gradients are summed in
    `mixed_precision.reduce_dtype`; a value head computes in float32, and so comes the output. Layers get activation
    checkpointing and offload, whether they are units or not.

    Args:
        module: on the meta device (or on the mesh's device).
        classes: of `unit_classes`.
        mesh: `Group.mesh`.

    Raises:
        ConfigError: activations are to be recomputed or offloaded, but nothing says what the layers are.
    """
    precision = settings.mixed_precision
    policy = partial(
        MixedPrecisionPolicy,
        param_dtype=compute,
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        cast_forward_inputs=precision.cast_forward_inputs,
    )
    offloaded = home_device(settings, torch.device(mesh.device_type)).type != mesh.device_type
    wrap = partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=settings.reshard_after_forward,
        offload_policy=CPUOffloadPolicy() if offloaded else OffloadPolicy(),
    )
    chosen = _units(module, classes, settings.wrap_policy)
    wrapped = _wrap_layers(module, classes, settings)
    for unit in chosen:  # inner ones first where units nest
        wrap(wrapped.get(unit, unit), mp_policy=policy())
    if isinstance(module, ValueModel):
        wrap(module.value_head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32))
    wrap(module, mp_policy=policy(output_dtype=torch.float32))
    units: list[FSDPModule] = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if settings.forward_prefetch:
        for place, ahead in enumerate(units, start=1):
            ahead.set_modules_to_forward_prefetch(units[place : place + settings.forward_prefetch])
    return _report(module, settings, len(units), compute, mesh)


def settle_buffers(module: nn.Module, settings: FsdpConfig, device: torch.device) -> None:
    """Cast floating-point buffers to `mixed_precision.buffer_dtype`, and bring all to the device that computes (with
    `offload_policy` they were materialised in host memory, like the parameters, which stay there)."""
    dtype = getattr(torch, settings.mixed_precision.buffer_dtype)
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device=device, dtype=dtype if buffer.is_floating_point() else None))


def _units(module: nn.Module, classes: set[str], wrap_policy: WrapPolicyConfig) -> list[nn.Module]:
    """The modules that become units, inner ones first."""
    kind, least = wrap_policy.auto_wrap, wrap_policy.min_num_params
    if kind == "NO_WRAP":
        return []
    if kind == "SIZE_BASED_WRAP":
        classes, least = set(), least or SIZE_BASED_LEAST
    possible, taken, units = set(_possible_units(module)), set[nn.Parameter](), list[nn.Module]()
    for candidate in _inner_first(module):
        named = type(candidate).__name__ in classes
        if candidate in possible:
            own = sum(parameter.numel() for parameter in candidate.parameters() if parameter not in taken)
            if own and (named or (least and own >= least)):
                units.append(candidate)
                taken.update(candidate.parameters())
        elif named:
            log.warning(
                "One %s cannot be an FSDP unit of its own (it shares parameters, or does not run once in each forward); it stays "
                "in the unit around it.",
                type(candidate).__name__,
            )
    return units


def _wrap_layers(module: nn.Module, classes: set[str], settings: FsdpConfig) -> dict[nn.Module, nn.Module]:
    """Let layers keep less on the device between forward and backward: what now stands in the place of each."""
    runner = layer_runner(settings)
    if runner is None:
        return {}
    listed = list(_listed(module))
    by_class = [layer for layer in _possible_units(module) if type(layer).__name__ in classes]
    layers = [layer for layer in listed if layer in by_class] or by_class or listed
    inside = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    outer = set(layers) - inside  # a layer within a layer would be recomputed twice
    if not outer:
        raise ConfigError(
            f"{CHECKPOINTING}, activation_cpu_offload: nothing says what the layers of {type(module).__name__} are. Set "
            f"fsdp.wrap_policy.auto_wrap to TRANSFORMER_BASED_WRAP and name their classes in {CLASSES}."
        )
    places = [(parent, name) for parent in module.modules() for name, child in parent.named_children() if child in outer]
    wrapped: dict[nn.Module, nn.Module] = {}
    for parent, name in places:
        layer = getattr(parent, name)
        wrapped[layer] = checkpoint_wrapper(layer, checkpoint_fn=runner)
        setattr(parent, name, wrapped[layer])
    return wrapped


def _possible_units(module: nn.Module) -> Iterator[nn.Module]:
    """Modules whose forward runs once in each forward of the model, on every rank, and whose parameters nobody else uses.

    Not the head, nor what is around it: it runs for one chunk of tokens at a time, and ranks have different numbers of chunks.
    Not what stands in a list within a layer: those are experts, which run where tokens are routed to them. As units, both
    would let ranks wait for each other forever.
    """
    uses = _uses(module)

    def walk(candidate: nn.Module, in_layer: bool) -> Iterator[nn.Module]:
        runs = type(candidate).forward is not nn.Module.forward  # lists have none
        if runs and all(uses[parameter] == count for parameter, count in _uses(candidate).items()):
            yield candidate
        if in_layer and isinstance(candidate, nn.ModuleList | nn.ModuleDict):
            return
        for child in candidate.children():
            yield from walk(child, in_layer or isinstance(candidate, nn.ModuleList))

    models = (getattr(inner, "base_model", None) for inner in module.modules())
    backbone = next((model for model in models if isinstance(model, nn.Module)), module)
    return (candidate for candidate in walk(backbone, in_layer=False) if candidate is not module)


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """How many places in the tree use each parameter."""
    owners = (owner for _, owner in module.named_modules(remove_duplicate=False))
    return Counter(parameter for owner in owners for parameter in owner.parameters(recurse=False))


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of lists that may be units: layers, whatever their class."""
    possible = set(_possible_units(module))
    lists = (each for each in module.modules() if isinstance(each, nn.ModuleList))
    return (layer for each in lists for layer in each if layer in possible)


def _names(modules: Iterable[nn.Module]) -> set[str]:
    return {type(module).__name__ for module in modules}


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _report(module: nn.Module, settings: FsdpConfig, units: int, compute: torch.dtype, mesh: DeviceMesh) -> ShardReport:
    shards = mesh.size(mesh.ndim - 1)
    total = local = size = bound = 0
    held = set()
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        shard_ = parameter.to_local()
        total, local, size = total + parameter.numel(), local + shard_.numel(), size + shard_.numel() * shard_.element_size()
        rows = parameter.shape[0]
        bound += math.ceil(rows / shards) * (parameter.numel() // max(rows, 1))
        held.add(_name(parameter.dtype))
    assert local <= bound, f"{local} of {total} parameters on one of {shards} ranks, at most {bound} expected"
    return ShardReport(
        settings.strategy, mesh.size() // shards, shards, units, total, local, size,
        " and ".join(sorted(held)), _name(compute), settings.mixed_precision.reduce_dtype,
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
