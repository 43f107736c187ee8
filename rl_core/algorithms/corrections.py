"""Training gives other probabilities to the tokens of the rollout than the rollout did that drew them: weights for that."""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked
from rl_core.config.algorithm import AlgorithmConfig

FARTHEST = 20.0
"""Bound of the logarithm of a weight, as in verl."""


@torch.no_grad()
def rollout_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor | None, dict[str, float]]:
    """Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (fengyao.notion.site/off-policy-rl), as in verl. With d_t = old_logprob - rollout_logprob of a token:

        token       w_t = min(exp(d_t), rollout_is_threshold)
        sequence    w_t = min(exp(Σ_t d_t), rollout_is_threshold), the same for all tokens of a response

    Args:
        old_logprobs: [B, R] of the trained policy before the updates.
        rollout_logprobs: [B, R] that the tokens were drawn with.
        mask: [B, R] bool.

    Returns:
        weights [B, R] of the policy loss, 0 where the mask is false, or None where `rollout_is` is none; and metrics under verl's
        names, all per token: `kl` and `k3_kl`, estimates of KL(rollout ‖ training); `rollout_is_mean` of the weights; `_min` and
        `_max` of them before truncation, and `rollout_is_ratio_fraction_high`, the share that is truncated.
    """
    difference = masked(old_logprobs - rollout_logprobs, mask)
    bounded = difference.clamp(-FARTHEST, FARTHEST)
    if not mask.any():
        return (None if algorithm.rollout_is == "none" else torch.zeros_like(difference)), {}
    metrics = {"kl": _mean(-difference, mask), "k3_kl": _mean(bounded.exp() - 1 - bounded, mask)}
    if algorithm.rollout_is == "none":
        return None, metrics
    if algorithm.rollout_is == "sequence":
        bounded = difference.sum(dim=1, keepdim=True).clamp(-FARTHEST, FARTHEST).expand_as(difference)
    ratios = masked(bounded.exp(), mask)
    weights = ratios.clamp(max=algorithm.rollout_is_threshold)
    return weights, metrics | {
        "rollout_is_mean": _mean(weights, mask),
        "rollout_is_min": float(ratios[mask].min()),
        "rollout_is_max": float(ratios[mask].max()),
        "rollout_is_ratio_fraction_high": _mean((ratios > algorithm.rollout_is_threshold).double(), mask),
    }


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].double().mean())
