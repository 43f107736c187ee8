"""The weighted sum of several rewards."""

import math
from typing import TYPE_CHECKING, Any

from rl_core.rewards.judgement import NOT_APPLICABLE, Judgement

if TYPE_CHECKING:
    from rl_core.data.prompts import Prompt


class WeightedSum:
    """Adds up what its parts say; those that do not apply to a response count nothing.

    Args:
        parts: name, weight and reward of each.
    """

    def __init__(self, parts: list[tuple[str, float, Any]]) -> None:
        self._parts = parts

    def __call__(self, prompts: "list[Prompt]", responses: list[str], ids: list[list[int]]) -> list[Judgement]:
        """One judgement for each response; each part's score and extras are among the extras, under the part's name.

        Raises:
            RewardError: a part cannot judge a response.
        """
        columns = [reward(prompts, responses, ids) for _, _, reward in self._parts]
        return [self._sum(row, len(tokens)) for row, tokens in zip(zip(*columns, strict=True), ids, strict=True)]

    def _sum(self, judgements: tuple[Judgement, ...], length: int) -> Judgement:
        extras: dict[str, float] = {}
        total, tokens, failed = math.nan, [0.0] * length, None
        for (name, weight, _), judgement in zip(self._parts, judgements, strict=True):
            extras |= {f"{name}/{key}": value for key, value in judgement.extras.items()}
            if judgement.failed not in (None, NOT_APPLICABLE):
                failed = failed or judgement.failed
            if math.isnan(judgement.score):
                continue
            extras[name] = judgement.score
            total = weight * judgement.score + (0.0 if math.isnan(total) else total)
            for place, value in enumerate(judgement.tokens or []):
                tokens[place] += weight * value
            if judgement.tokens is None and length:
                tokens[-1] += weight * judgement.score
        if math.isnan(total):
            return Judgement(total, None, extras, NOT_APPLICABLE)
        spread = any(judgement.tokens is not None for judgement in judgements)
        return Judgement(total, tokens if spread else None, extras, failed)


def distinct(names: list[str]) -> list[str]:
    """The names with numbers behind those that came before: a, b, a_2."""
    return [name if (seen := names[:place].count(name)) == 0 else f"{name}_{seen + 1}" for place, name in enumerate(names)]
