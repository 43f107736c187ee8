"""What a validation looks at in a module that `fully_shard` has wrapped: its layers, its weights, its gradients."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl_core.models.local import local
from rl_core.models.lora import plain_name

MOST_LEFT = 0.1
"""Share of a layer's parameters that may be in none of its units: the norms, where attention and MLP are units."""


def layers(module: nn.Module) -> tuple[set[str], Counter[str]]:
    """Classes of the layers (elements of lists, outermost) that are FSDP units or consist of such, and of the others, with their
    number. What shares its parameters with something else cannot be a unit, and does not count."""
    owners = (owner for _, owner in module.named_modules(remove_duplicate=False))
    uses = Counter(parameter for owner in owners for parameter in owner.parameters(recurse=False))
    wrapped, missed = set[str](), Counter[str]()
    for layer in _listed(module):
        units = {parameter for inner in layer.modules() if isinstance(inner, FSDPModule) for parameter in inner.parameters()}
        sizes = {parameter: parameter.numel() for parameter in layer.parameters()}
        left = sum(size for parameter, size in sizes.items() if parameter not in units)
        if left <= MOST_LEFT * sum(sizes.values()):
            wrapped.add(_class(layer))
        elif all(uses[parameter] == 1 for parameter in sizes):
            missed[_class(layer)] += 1
    return wrapped, missed


def not_finite(module: nn.Module) -> str | None:
    """The first parameter or buffer of which this rank's part is not finite."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return next((plain_name(name) for name, tensor in tensors if not local(tensor).detach().isfinite().all()), None)


@torch.no_grad()
def let_gradients_through(module: nn.Module) -> None:
    """Give a value head and the second halves of adapters other values than the zeros that they begin with, which keep all
    gradients from what is before them."""
    for name, parameter in module.named_parameters():
        if "lora_B" in name or name.startswith("value_head."):
            local(parameter).fill_(1 / parameter.shape[-1])


@dataclass(frozen=True)
class Gradients:
    """Names of trained parameters, over all ranks of the role."""

    trained: list[str]
    missing: list[str]
    """Without a gradient: the forward does not use them, or detaches what it makes of them."""
    idle: list[str]
    """The same of experts: so few tokens do not come to all of them."""
    infinite: list[str]
    """With an infinite gradient or NaN in it."""
    zero: list[str]
    """With zeros only."""


def gradients(module: nn.Module, process_group: dist.ProcessGroup | None) -> Gradients:
    """Look at the gradients after a backward. Collective over the group."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    seen = torch.zeros(len(trained), 2, dtype=torch.long)  # on the CPU, for any backend
    missing = {name for name, parameter in trained.items() if parameter.grad is None}
    for row, parameter in enumerate(trained.values()):
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            seen[row] = torch.tensor([int(not gradient.isfinite().all()), int(bool(gradient.any()))])
    if trained:
        dist.all_reduce(seen, group=process_group)
    infinite = {name for name, counts in zip(trained, seen.tolist(), strict=True) if counts[0]}
    nonzero = {name for name, counts in zip(trained, seen.tolist(), strict=True) if counts[1]}
    experts = {name for name in missing if _in_expert(module, name)}

    def named(names: set[str]) -> list[str]:
        return [plain_name(name).removeprefix("model.") for name in trained if name in names]

    return Gradients(
        trained=named(set(trained)),
        missing=named(missing - experts),
        idle=named(experts),
        infinite=named(infinite),
        zero=named(trained.keys() - missing - infinite - nonzero),
    )


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists that are not within a unit (the module itself apart)."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, FSDPModule):
            yield from _listed(child)


def _class(layer: nn.Module) -> str:
    """A layer's own class: `fully_shard` makes another of it, and checkpointing puts a module around it."""
    inner = getattr(layer, "_checkpoint_wrapped_module", layer)
    return type(inner).__name__.removeprefix("FSDP")


def _in_expert(module: nn.Module, name: str) -> bool:
    """Whether a parameter stands in a list within a list: in an expert, a module that runs where tokens are routed to it."""
    path, lists = module, 0
    for part in name.split(".")[:-1]:
        path = getattr(path, part)
        lists += isinstance(path, nn.ModuleList)
    return lists > 1
