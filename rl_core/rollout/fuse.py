"""Projections of one input computed together – queries, keys and values; gate and up – since few large products beat many small.

The weights of the modules become parts of one matrix and stay where they are from then on: whoever copies into them by name, as
`sync_weights` does, fills that matrix.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear modules that transformers' models give the same input, in this order."""


class _Joint:
    """The matrices, and their product with the input of the first module until the last has had its part."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = torch.cat([linear.weight.data for linear in linears])
        self.bias = None if linears[0].bias is None else torch.cat([linear.bias.data for linear in linears])
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()


class _First(nn.Linear):
    """The first module of a group. (The class of a module is exchanged, not its `forward`: compiled layers are then alike.)"""

    joint: _Joint

    def forward(self, input: Tensor) -> Tensor:
        joint = self.joint
        joint.parts = functional.linear(input, joint.weight, joint.bias).split(joint.sizes, dim=-1)
        joint.input = input
        return joint.parts[0]


class _Later(nn.Linear):
    """Another one; computes by itself, should its input be another."""

    joint: _Joint
    index: int

    def forward(self, input: Tensor) -> Tensor:
        joint = self.joint
        if joint.input is not input:
            return functional.linear(input, self.weight, self.bias)
        part = joint.parts[self.index]
        if self.index == len(joint.sizes) - 1:  # nothing is kept
            joint.input, joint.parts = None, ()
        return part


def _join(linears: list[nn.Linear]) -> None:
    joint = _Joint(linears)
    for index, linear in enumerate(linears):
        linear.weight = nn.Parameter(joint.weight.split(joint.sizes)[index], requires_grad=False)
        if joint.bias is not None:
            linear.bias = nn.Parameter(joint.bias.split(joint.sizes)[index], requires_grad=False)
        linear.__class__ = _Later if index else _First
        vars(linear).update(joint=joint, index=index)


def fuse_projections(model: nn.Module) -> int:
    """Let modules of `TOGETHER` be computed together wherever a module of the model has them.

    Args:
        model: materialised, not trained; its weights keep their names, and their values.

    Returns:
        How many groups there are.
    """
    groups = 0
    for parent in model.modules():
        for names in TOGETHER:
            linears = [getattr(parent, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in linears) and _alike(linears):  # type: ignore[arg-type]
                _join(linears)  # type: ignore[arg-type]
                groups += 1
    return groups


def _alike(linears: list[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.bias is None, linear.weight.dtype) for linear in linears}) == 1
