"""What the responses of a step are worth, by whatever the configuration says: functions, a reward model, or both weighted."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.batching import BatchPlan
from rl_core.config import Config
from rl_core.config.reward import weight_of_model
from rl_core.data.prompts import Prompt
from rl_core.distributed import World
from rl_core.errors import RewardError
from rl_core.phases import portion
from rl_core.rewards import Judgement, Reward
from rl_core.rewards.judgement import NOT_APPLICABLE
from rl_core.role import Role
from rl_core.rollout.batch import RolloutBatch
from rl_core.together import together

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Of B responses of at most R tokens; the same on all ranks."""

    total: Tensor
    """[B] float32: what each response is worth, empty ones included."""
    tokens: Tensor
    """[B, R] float32: where that falls: at each token as the reward says, or all of it at the last one."""
    metrics: dict[str, list[float]]
    """By name, one number for each response that has one: `reward/<name>` of what functions return beside a score and of the
    parts of a weighted reward; `reward/failed/<why>`, 0 or 1 for each response, where any got no judgement."""


class Scorer:
    """Scores responses; the ranks share the work.

    Args:
        reward: of `build_reward`; None: a reward model alone judges.
        judge: the reward model, on all ranks; None: there is none.
    """

    def __init__(self, config: Config, tokenizer: Any, world: World, reward: Reward | None, judge: Role | None) -> None:
        assert reward is not None or judge is not None, "a function or a model"
        self._tokenizer, self._world, self._plan = tokenizer, world, BatchPlan.of(config)
        self._reward, self._judge, self._weight = reward, judge, weight_of_model(config.reward)
        self._warned = False

    def __call__(self, prompts: list[Prompt], batch: RolloutBatch, n: int) -> Scores:
        """Score `n` responses to each prompt; response number i answers prompt i // n. Collective.

        Raises:
            RewardError: a response cannot be judged and `on_error` says to stop, or none can (on all ranks).
        """
        judgements = [Judgement(0.0)] * len(batch) if self._reward is None else self._judgements(self._reward, prompts, batch, n)
        self._check(judgements)
        metrics = _metrics(judgements)
        total, tokens = _tensors(judgements, batch)
        if self._judge is not None:
            scores = self._by_model(self._judge, batch)
            if self._reward is not None:
                metrics["reward/model"] = scores.tolist()
            total += self._weight * scores
            tokens += _at_last_token(self._weight * scores, batch)
        return Scores(total, tokens, metrics)

    def _check(self, judgements: list[Judgement]) -> None:
        if all(judgement.failed not in (None, NOT_APPLICABLE) for judgement in judgements):
            raise RewardError(
                f"reward: none of the {len(judgements)} responses could be judged; the warnings above say why. To go on would "
                "teach nothing. Mend the reward, then run the same command again."
            )
        unrated = any(math.isnan(judgement.score) for judgement in judgements)
        if unrated and self._judge is None and not self._warned:
            self._warned = True
            log.warning("A response that no reward applies to (None) is worth 0; such ones are counted in reward/failed.")

    def _judgements(self, reward: Reward, prompts: list[Prompt], batch: RolloutBatch, n: int) -> list[Judgement]:
        mine = list(range(self._world.rank, len(batch), self._world.size))
        responses = batch.responses
        ids = [responses[row] for row in mine]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        own = together(lambda: reward([prompts[row // n] for row in mine], texts, ids))
        parts: list[Any] = [None] * self._world.size
        dist.all_gather_object(parts, own)
        return [parts[row % self._world.size][row // self._world.size] for row in range(len(batch))]

    @torch.no_grad()
    def _by_model(self, role: Role, batch: RolloutBatch) -> Tensor:
        """[B] what the reward model says. Collective."""
        scores = torch.zeros(len(batch), device=batch.input_ids.device)
        if role.module is not None:
            portions = self._plan.portions(batch, role.group.data_parallel, role.group.part)
            parts = [portion(batch, rows) for rows in portions]
            model = role.module
            encoded = together(lambda: [model.encode(part.prompts, part.responses) for part in parts], role.group.process_group)
            with role.loaded():
                for rows, inputs in zip(portions, encoded, strict=True):
                    scores[rows] = model(*inputs)[: len(rows)]
        return role.share(scores)


def _tensors(judgements: list[Judgement], batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    device = batch.input_ids.device
    scores = [0.0 if math.isnan(judgement.score) else judgement.score for judgement in judgements]
    total = torch.tensor(scores, dtype=torch.float32, device=device)
    tokens = _at_last_token(total, batch)
    for row, judgement in enumerate(judgements):
        if judgement.tokens is not None:
            placed = torch.tensor(judgement.tokens, dtype=torch.float32, device=device)
            tokens[row, : len(placed)], tokens[row, len(placed) :] = placed, 0.0
    return total, tokens


def _at_last_token(scores: Tensor, batch: RolloutBatch) -> Tensor:
    """[B, R] with each score [B] at its response's last token; an empty response has none."""
    last = torch.arange(batch.width, device=scores.device) == batch.response_length[:, None] - 1
    return torch.where(last, scores[:, None], 0.0)


def _metrics(judgements: list[Judgement]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for judgement in judgements for name in judgement.extras)
    metrics = {
        f"reward/{name}": [judgement.extras[name] for judgement in judgements if name in judgement.extras] for name in names
    }
    for kind in sorted({judgement.failed for judgement in judgements if judgement.failed}):
        metrics[f"reward/failed/{kind}"] = [float(judgement.failed == kind) for judgement in judgements]
    return metrics
