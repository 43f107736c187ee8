"""What the updates of a step learn from: the responses with advantages, and what these are made of."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_core import algorithms
from rl_core.batching import BatchPlan
from rl_core.config import Config
from rl_core.metrics import StepStatistics
from rl_core.rollout.batch import RolloutBatch
from rl_core.scoring import Scores


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What one step's rollout gives to the updates; all tensors are [B, R] over the response tokens."""

    batch: RolloutBatch
    logprobs: Tensor
    """Of the policy that generated the responses."""
    ref_logprobs: Tensor | None
    """Of the reference policy; None where no KL is charged."""
    values: Tensor | None
    """Of the critic before the updates; None without a critic."""
    advantages: Tensor
    returns: Tensor
    importance: Tensor | None = None
    """Factors of the policy loss for what the rollout drew with other probabilities than training has; None: none."""

    def select(self, rows: Tensor) -> "Experience":
        """The given rows, as narrow as they allow; without rows, one dummy row of no weight."""
        part = self.batch.select(rows) if len(rows) else self.batch.select(rows).pad_rows(1)
        blank = torch.zeros(len(part), part.width, device=part.input_ids.device)
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "batch"}
        cut = {
            name: None if tensor is None else tensor[rows, : part.width] if len(rows) else blank
            for name, tensor in tensors.items()
        }
        return Experience(batch=part, **cut)  # type: ignore[arg-type]

    def mini_batches(self, plan: BatchPlan) -> "Iterator[Experience]":
        """The mini-batches in the order of the samples, `ppo_epochs` times over."""
        rows = torch.arange(len(self.batch)).split(plan.mini_batch)
        for _ in range(plan.ppo_epochs):
            yield from map(self.select, rows)


def make_experience(
    batch: RolloutBatch,
    scores: Scores,
    baseline: Tensor | None,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    values: Tensor | None,
    kl_coef: float,
    config: Config,
    stats: StepStatistics,
) -> Experience:
    """Token rewards (the scores, less the KL at each token), advantages, whitening over all responses of the step, and the
    weights that correct for the rollout's own probabilities.

    Args:
        baseline: [prompts] scores of the greedy responses, where the estimator needs them.
        logprobs, ref_logprobs, values: [B, R] of the policy, the reference and the critic before the update.
        kl_coef: weight of the KL in this step.
    """
    algorithm, mask, charged = config.algorithm, batch.mask, None
    if ref_logprobs is not None:
        divergence = algorithms.kl(logprobs, ref_logprobs, mask, config.kl_estimator)
        stats.token_mean("actor/reference_kl", divergence, mask)
        stats.mean("actor/kl_coef", kl_coef, 1)
        charged = divergence if algorithm.kl_in == "reward" else None
    rewards = algorithms.token_rewards(scores.tokens, charged, kl_coef, mask)
    group = batch.sample_index // config.rollout.n
    signals = algorithms.Signals(
        rewards=rewards,
        mask=mask,
        group=group,
        values=values,
        baseline=None if baseline is None else baseline[group],
    )
    advantages, returns = algorithms.estimate(signals, algorithm)
    if algorithm.whitens:
        advantages = algorithms.whiten(advantages, mask)
    importance, differences = algorithms.rollout_weights(logprobs, batch.logprobs, mask, algorithm)
    for name, value in differences.items():
        stats.mean(f"rollout_corr/{name}", value, 1)
    stats.per_sample("critic/rewards", rewards.sum(dim=1))
    for name, tensor in {"values": values, "advantages": advantages, "returns": returns}.items():
        if tensor is not None:
            stats.token_mean(f"critic/{name}/mean", tensor, mask)
    return Experience(
        batch=batch,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        advantages=advantages,
        returns=returns,
        importance=importance,
    )


def reference_kl(experience: Experience, config: Config) -> float:
    """The mean KL per token to the reference in this step, by which an adaptive coefficient moves; 0 without a reference."""
    if experience.ref_logprobs is None:
        return 0.0
    mask = experience.batch.mask
    divergence = algorithms.kl(experience.logprobs, experience.ref_logprobs, mask, config.kl_estimator)
    return float(divergence.double().sum() / mask.sum().clamp(min=1))
