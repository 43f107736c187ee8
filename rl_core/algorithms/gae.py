"""Token rewards, and the sum over what follows: generalised advantage estimation, of which discounted returns are a case."""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked


def token_rewards(scores: Tensor, kl_per_token: Tensor | None, kl_coef: float, mask: Tensor) -> Tensor:
    """Reward of each token: its score, less `kl_coef` times the KL.

    Ziegler et al. 2019 (arXiv:1909.08593) eq. 2, charged token by token as in verl and TRL.

    Args:
        scores: [B, R], where the response's score falls: all of it at the last token, or some at each.
        kl_per_token: [B, R] from `kl`, or None where no KL is charged.
        kl_coef: weight of the KL.
        mask: [B, R] bool; a row without any token gets no reward at all.

    Returns:
        [B, R] as `scores`, 0 where the mask is false.
    """
    rewards = masked(scores, mask)
    if kl_per_token is not None:
        rewards = rewards - kl_coef * masked(kl_per_token, mask).to(rewards.dtype)
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


def to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[B, R] the discounted sum of a token's reward and of those that follow in its response, 0 where the mask is false.

    That is `gae` with lam = 1 and no values.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]
