"""What is asked of the rollout engine."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Requests:
    """One response wanted for each of N prompts."""

    prompts: list[list[int]]
    """Token ids, at least one each. Equal prompts are computed once where they come together."""
    numbers: list[int]
    """Number of each sample in its step over all ranks; decides its draws together with `seed` and `step`."""
    limits: list[int]
    """The longest response of each."""
    stops: list[frozenset[int]]
    """Each response ends with the first of its own of these."""
    temperature: float
    """0 is greedy."""
    top_k: int
    """0: all tokens."""
    top_p: float
    """1: all tokens."""
    seed: int
    step: int

    def __len__(self) -> int:
        return len(self.prompts)

    def stops_of(self, rows: list[int], width: int = 1) -> Tensor:
        """[rows, E] long: the end tokens of each, filled up with -1; E is `width` or more."""
        width = max([width, *(len(self.stops[row]) for row in rows)])
        return torch.tensor([[*sorted(self.stops[row]), *[-1] * (width - len(self.stops[row]))] for row in rows])

    def ends(self, row: int, tokens: list[int]) -> tuple[int, bool]:
        """The length of a response of which more tokens were drawn, and whether it was cut."""
        for place, token in enumerate(tokens[: self.limits[row]]):
            if token in self.stops[row]:
                return place + 1, False
        return self.limits[row], True
