"""A user's own estimator and loss."""

import re

import pytest
import torch

from rl_core import algorithms
from rl_core.config.algorithm import AlgorithmConfig
from rl_core.errors import ConfigError
from tests.rl_core.algorithms.ragged import ragged

MINE = """
import torch

def half(signals, algorithm):
    advantages = torch.where(signals.mask, signals.rewards * algorithm.gamma, float("inf"))
    return advantages, advantages + 1

def lonely(signals, algorithm):
    return signals.rewards

def narrow(signals, algorithm):
    return signals.rewards[:, :2], signals.rewards

def whole(signals, algorithm):
    return signals.mask, signals.rewards

def squared(update, algorithm):
    loss = (update.logprobs - update.old_logprobs).square() * algorithm.clip_ratio_c
    return loss, {"far": loss.detach().max(), "mean": loss.sum()}

def number(update, algorithm):
    return update.logprobs.sum(), {}

def detached(update, algorithm):
    return update.logprobs.detach(), {}

def said(update, algorithm):
    return update.logprobs, {"far": 1.0}
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def estimate(path, name):
    return algorithms.estimate(ragged(0).signals(), AlgorithmConfig(adv_estimator={"path": path, "name": name}, gamma=0.5))


def loss(path, name):
    update = ragged(0).update()
    update.logprobs.requires_grad_()
    return update, algorithms.policy_loss(update, AlgorithmConfig(policy_loss={"path": path, "name": name}, clip_ratio_c=2.0))


def test_own_estimator(mine):
    case = ragged(0)
    advantages, returns = estimate(mine, "half")
    expected = torch.where(case.mask, case.tensors["rewards"] / 2, 0.0)
    assert torch.equal(advantages, expected)  # the infinity under the mask is gone
    assert torch.equal(returns, torch.where(case.mask, expected + 1, 0.0))


def test_own_loss(mine):
    update, (value, sums) = loss(mine, "squared")
    expected = torch.where(update.mask, 2 * (update.logprobs - update.old_logprobs).square(), 0.0)
    assert torch.equal(value, expected)
    assert set(sums) == {"far", "mean"}
    assert not sums["mean"].requires_grad
    value.sum().backward()
    assert update.logprobs.grad is not None
    assert torch.equal(update.logprobs.grad, torch.where(update.mask, 4 * (update.logprobs - update.old_logprobs), 0.0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lonely", "it must be the two tensors (advantages, returns)"),
        ("narrow", "advantages must be a floating-point tensor of shape (12, 7), as the mask; it is (12, 2) torch.float64"),
        ("whole", "advantages must be a floating-point tensor of shape (12, 7), as the mask; it is (12, 7) torch.bool"),
    ],
)
def test_an_estimator_that_returns_something_else(mine, name, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        estimate(mine, name)
    assert str(caught.value).startswith(f"algorithm.adv_estimator: {name} in {mine} ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "loss must be a floating-point tensor of shape (12, 7), as the mask; it is () torch.float64"),
        ("detached", "no gradient flows through the loss"),
        ("said", "sums must be a dict of tensors of one number each"),
    ],
)
def test_a_loss_that_returns_something_else(mine, name, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        loss(mine, name)
    assert str(caught.value).startswith(f"algorithm.policy_loss: {name} in {mine} ")


def test_a_function_that_is_not_there(mine):
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator"):
        estimate(mine, "halve")
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss"):
        loss(f"{mine}.gone", "squared")
