"""From scores to token rewards, and from token rewards and values to advantages."""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked


def token_rewards(scores: Tensor, kl_per_token: Tensor | None, kl_coef: float, mask: Tensor) -> Tensor:
    """Reward of each token: the response's score at its last token, less `kl_coef` times the KL at every token.

    Ziegler et al. 2019 (arXiv:1909.08593) eq. 2, charged token by token as in verl and TRL.

    Args:
        scores: [B], one for a response.
        kl_per_token: [B, R] from `kl`, or None where no KL is charged.
        kl_coef: weight of the KL.
        mask: [B, R] bool; a row without any token gets no reward at all.

    Returns:
        [B, R] float32, 0 where the mask is false.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1, keepdim=True)
    rewards = torch.where(places == last, scores.float()[:, None], 0.0)
    if kl_per_token is not None:
        rewards = rewards - kl_coef * masked(kl_per_token.float(), mask)
    return rewards


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16) over the response's tokens.

        delta_t = r_t + gamma · V_{t+1} - V_t
        A_t = delta_t + gamma · lam · A_{t+1}

    where t + 1 is the next token that counts: gaps in the mask are stepped over (as in verl). The response's end is
    terminal: V and A after it are 0.

    Args:
        rewards: [B, R] from `token_rewards`.
        values: [B, R], the critic's value before each token is chosen.
        mask: [B, R] bool.
        gamma: discount per token.
        lam: 0 is the one-step temporal difference, 1 the discounted return less the value.

    Returns:
        advantages [B, R] and returns [B, R] (advantages + values, what the critic learns), both 0 where the mask is false.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = next_advantage
    advantages = masked(advantages, mask)
    return advantages, advantages + values
