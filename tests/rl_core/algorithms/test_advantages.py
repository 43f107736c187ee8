"""Advantages worked out by hand; `test_equations.py` has the random ones."""

import math

import pytest
import torch

from rl_core.algorithms import Signals, estimate, gae, token_rewards
from rl_core.config.algorithm import AlgorithmConfig


def test_gae_by_hand():
    # gamma 1/2, lam 1/2, rewards 0 0 4, values 1 2 3
    # delta: 0 + 1 - 1 = 0; 0 + 1.5 - 2 = -0.5; 4 - 3 = 1
    # A: 1; -0.5 + 1/4 = -0.25; 0 - 0.25/4 = -0.0625
    advantages, returns = gae(
        torch.tensor([[0.0, 0, 4]]), torch.tensor([[1.0, 2, 3]]), torch.ones(1, 3, dtype=torch.bool), 0.5, 0.5
    )
    assert advantages.tolist() == [[-0.0625, -0.25, 1.0]]
    assert returns.tolist() == [[0.9375, 1.75, 4.0]]


def test_gae_gap_by_hand():
    # The same response with a token that does not count in its middle: that token is stepped over.
    advantages, returns = gae(
        torch.tensor([[0.0, 0, 99, 4]]),
        torch.tensor([[1.0, 2, 77, 3]]),
        torch.tensor([[True, True, False, True]]),
        0.5,
        0.5,
    )
    assert advantages.tolist() == [[-0.0625, -0.25, 0.0, 1.0]]
    assert returns.tolist() == [[0.9375, 1.75, 0.0, 4.0]]


SIGNALS = Signals(
    rewards=torch.tensor([[0, 1.0, 0], [0, 0, 3.0], [5.0, 0, 0], [2.0, 0, 0], [7.0, 7.0, 7.0]]),
    mask=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]]).bool(),
    group=torch.tensor([8, 8, 8, 2, 8]),
    baseline=torch.tensor([0.5, 0.5, 0.5, 3.0, 0.5]),
)
"""Scores 1, 3 and 5 of lengths 2, 3 and 1 to one prompt and 2 to another. The last response has no token: it counts nowhere."""


@pytest.mark.parametrize(
    ("config", "by_response"),
    [
        # mean 3, unbiased standard deviation 2; alone: the score
        ({"adv_estimator": "grpo"}, [-1, 0, 1, 2]),
        ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, [-2, 0, 2, 2]),
        ({"adv_estimator": "reinforce_plus_plus_baseline"}, [-2, 0, 2, 2]),
        # 1 - (3 + 5) / 2, 3 - (1 + 5) / 2, 5 - (1 + 3) / 2
        ({"adv_estimator": "rloo"}, [-3, 0, 3, 2]),
        # (2 · 1 + 3 · 3 + 1 · 5) / 6 = 8 / 3
        ({"adv_estimator": "opo"}, [-5 / 3, 1 / 3, 7 / 3, 2]),
        ({"adv_estimator": "remax"}, [0.5, 2.5, 4.5, -1]),
    ],
)
def test_comparisons_by_hand(config, by_response):
    advantages, _ = estimate(SIGNALS, AlgorithmConfig(**config))
    expected = torch.where(SIGNALS.mask, torch.tensor([*by_response, 0.0])[:, None], 0.0)
    assert torch.allclose(advantages, expected, atol=1e-5)
    assert advantages.dtype == SIGNALS.rewards.dtype


def test_reinforce_plus_plus_by_hand():
    signals = Signals(
        rewards=torch.tensor([[1.0, 0, 9, 4]]), mask=torch.tensor([[True, True, False, True]]), group=torch.zeros(1).long()
    )
    advantages, returns = estimate(signals, AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5))
    assert advantages.tolist() == [[2.0, 2.0, 0.0, 4.0]]  # 1 + 2/2, 0 + 4/2, a gap, 4
    assert returns.tolist() == advantages.tolist()


def test_advantages_have_no_gradient():
    rewards, values = torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    signals = Signals(rewards=rewards, mask=torch.ones(2, 2).bool(), group=torch.zeros(2).long(), values=values)
    for name in ("gae", "grpo"):
        assert not any(tensor.requires_grad for tensor in estimate(signals, AlgorithmConfig(adv_estimator=name)))


def test_token_rewards_by_hand():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    scores = torch.tensor([[0.0, 1.0, math.nan], [0.25, math.inf, -1.0], [7.0, 7.0, 7.0]])
    per_token = torch.tensor([[0.5, 1.0, math.nan], [2.0, math.inf, 3.0], [math.nan] * 3])
    assert token_rewards(scores, None, 0.1, mask).tolist() == [[0, 1, 0], [0.25, 0, -1], [0, 0, 0]]
    charged = token_rewards(scores, per_token, 0.1, mask)
    assert torch.allclose(charged, torch.tensor([[-0.05, 0.9, 0], [0.05, 0, -1.3], [0, 0, 0]]), atol=1e-6)
