"""Random ragged rows for the tests of the algorithms, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms import Signals, Update


@dataclass(frozen=True)
class Ragged:
    """B responses of at most R tokens: full, short, with gaps, beginning late, of one token, empty."""

    mask: Tensor
    group: Tensor
    tensors: dict[str, Tensor]
    """[B, R] random numbers by name."""

    def signals(self) -> Signals:
        scale = torch.arange(40, dtype=torch.float64)
        return Signals(
            rewards=self.tensors["rewards"],
            mask=self.mask,
            group=self.group,
            values=self.tensors["values"],
            baseline=(scale.cos() * 2)[self.group],
        )

    def update(self, chosen: Tensor | None = None) -> Update:
        names = ("logprobs", "old_logprobs", "advantages")
        return Update(**{name: self.tensors[name] for name in names}, mask=self.mask, chosen=chosen)

    def rows(self, name: str) -> list[list[float]]:
        """The numbers of the tokens that count, by response."""
        return [row[kept].tolist() for row, kept in zip(self.tensors[name], self.mask, strict=True)]

    def spread(self, rows: list[list[float]]) -> Tensor:
        """[B, R] from one number for each token that counts."""
        result = torch.zeros(self.mask.shape, dtype=torch.float64)
        result[self.mask] = torch.tensor([number for row in rows for number in row], dtype=torch.float64)
        return result


def ragged(seed: int) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(12, 7, generator=generator) < 0.6
    mask[0] = True
    mask[1] = torch.arange(7) < 3
    mask[2], mask[3] = torch.arange(7) == 0, torch.arange(7) == 6
    mask[4] = False
    names = ("rewards", "values", "new_values", "returns", "advantages", "old_logprobs", "logprobs", "ref_logprobs")
    tensors = {name: torch.randn(12, 7, generator=generator, dtype=torch.float64) for name in (*names, "rollout_logprobs")}
    tensors["draws"] = torch.rand(12, 7, generator=generator, dtype=torch.float64)
    group = torch.tensor([5, 5, 5, 9, 9, 9, 31, 31, -1, 0, 0, 5])  # in order, apart, and alone
    return Ragged(mask, group[torch.randperm(12, generator=generator)], tensors)
