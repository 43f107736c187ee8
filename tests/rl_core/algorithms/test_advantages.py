import math

import pytest
import torch

from rl_core.algorithms import gae, token_rewards


def slow_gae(rewards, values, gamma, lam):
    """Eq. 16 as it is written: the sum over l of (gamma·lam)^l delta_{t+l}, for one response without gaps, in float64."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


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


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.7)])
def test_gae_on_ragged_rows_with_gaps(gamma, lam):
    torch.manual_seed(1)
    mask = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1],
            [1, 1, 1, 0, 0, 0],  # short
            [1, 0, 0, 1, 1, 0],  # gap
            [0, 0, 1, 0, 1, 0],  # begins late
            [1, 0, 0, 0, 0, 0],  # one token
            [0, 0, 0, 0, 0, 0],  # empty
        ]
    ).bool()
    rewards, values = torch.randn(6, 6), torch.randn(6, 6)
    garbage = torch.where(mask, 0.0, torch.tensor(math.nan))
    advantages, returns = gae(rewards + garbage, values + garbage, mask, gamma, lam)
    for row in range(6):
        places = mask[row].nonzero()[:, 0].tolist()
        kept = [rewards[row, t].item() for t in places], [values[row, t].item() for t in places]
        expected = [0.0] * 6
        targets = [0.0] * 6
        for t, advantage, value in zip(places, slow_gae(*kept, gamma, lam), kept[1], strict=True):
            expected[t], targets[t] = advantage, advantage + value
        assert advantages[row].tolist() == pytest.approx(expected, abs=1e-5)
        assert returns[row].tolist() == pytest.approx(targets, abs=1e-5)


def test_gae_gives_no_gradient():
    values = torch.zeros(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2, dtype=torch.bool), 1.0, 1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_token_rewards_by_hand():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]]).bool()
    per_token = torch.tensor([[0.5, 1.0, math.nan], [2.0, math.inf, 3.0], [math.nan] * 3, [4.0, 9.0, 9.0]])
    scores = torch.tensor([1.0, -1.0, 7.0, 0.5])
    assert token_rewards(scores, None, 0.1, mask).tolist() == [[0, 1, 0], [0, 0, -1], [0, 0, 0], [0.5, 0, 0]]
    charged = token_rewards(scores, per_token, 0.1, mask)
    expected = torch.tensor([[-0.05, 0.9, 0], [-0.2, 0, -1.3], [0, 0, 0], [0.1, 0, 0]])
    assert torch.allclose(charged, expected, atol=1e-6)
