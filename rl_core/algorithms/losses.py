"""The losses of the critic and of the entropy bonus, per token and unreduced, as those in `rl_core.algorithms.policy_losses`."""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked, masked_sum

Stats = dict[str, Tensor]


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
