"""The losses of PPO, per token and unreduced.

The caller sums them over the mask and divides by the number of tokens of the whole mini-batch on all ranks. Only so the
gradient does not depend on how the mini-batch is cut into micro-batches or spread over ranks. The statistics are sums over
the mask for the same reason; divided by that number they are the metrics of the same name in verl.
"""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked, masked_sum

Stats = dict[str, Tensor]


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, c: float
) -> tuple[Tensor, Stats]:
    """Clipped surrogate loss, Schulman et al. 2017 (arXiv:1707.06347) eq. 7, with the dual clip of Ye et al. 2020
    (arXiv:1912.09729).

    With ρ = exp(logprob - old_logprob) and advantage A:

        L = max(-A·ρ, -A·clip(ρ, 1 - low, 1 + high));   where A < 0 also L = min(L, -A·c)

    Args:
        logprobs: [B, R] of the policy being trained; gradients flow through it.
        old_logprobs: [B, R] of the policy that the responses were drawn from.
        advantages: [B, R].
        mask: [B, R] bool.
        low, high: clip range of the ratio.
        c: bound of the ratio for negative advantages, > 1.

    Returns:
        loss [B, R], 0 where the mask is false, and sums over the mask: `pg_clipfrac` (tokens where the clip decides),
        `pg_clipfrac_lower` (tokens where the dual clip decides), `ppo_kl` (old_logprob - logprob, k1 to the old policy).
    """
    # The exponent is bounded as in verl: exp(±20) is beyond every clip, and exp(89) would be inf.
    log_ratio = masked(logprobs - old_logprobs, mask).clamp(-20.0, 20.0)
    advantages = masked(advantages, mask)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    single = torch.maximum(plain, clipped)
    bound = -advantages * c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(single, bound), single)
    stats = {
        "pg_clipfrac": masked_sum((clipped > plain).float(), mask),
        "pg_clipfrac_lower": masked_sum((negative & (single > bound)).float(), mask),
        "ppo_kl": masked_sum(-log_ratio.detach(), mask),
    }
    return loss, stats


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float) -> tuple[Tensor, Stats]:
    """Squared error of the critic, with the new value kept within `cliprange` of the old one (as in verl and TRL; after
    OpenAI baselines' `ppo2`).

        L = max((V - R)², (clip(V, V_old - cliprange, V_old + cliprange) - R)²) / 2

    Args:
        values: [B, R] of the critic being trained; gradients flow through it.
        old_values: [B, R] from before the update.
        returns: [B, R] from `gae`.
        mask: [B, R] bool.
        cliprange: how far a value may move.

    Returns:
        loss [B, R], 0 where the mask is false, and sums over the mask: `vf_clipfrac` (tokens where the clip decides) and
        `vpred_mean` (the values).
    """
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    moved = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, clipped = (values - returns).square(), (moved - returns).square()
    stats = {
        "vf_clipfrac": masked_sum((clipped > plain).float(), mask),
        "vpred_mean": masked_sum(values.detach(), mask),
    }
    return 0.5 * torch.maximum(plain, clipped), stats


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """Loss whose weight is `entropy_coeff`: minus the entropy [B, R] of the policy at each token, 0 where the mask is false."""
    return -masked(entropy, mask)
