"""Losses worked out by hand; `test_equations.py` has the random ones."""

import pytest
import torch

from rl_core.algorithms import Update, policy_loss, row_weights, value_loss
from rl_core.config.algorithm import AlgorithmConfig


def losses(name, ratios, advantages, chosen=None, **config):
    """Of one response whose old log-probabilities are -1: losses, their derivatives and the sums."""
    logprobs = (torch.tensor([ratios]).log() - 1).requires_grad_()
    update = Update(
        logprobs=logprobs,
        old_logprobs=torch.full((1, len(ratios)), -1.0),
        advantages=torch.tensor([advantages]),
        mask=torch.ones(1, len(ratios), dtype=torch.bool),
        chosen=None if chosen is None else torch.tensor([chosen]),
    )
    loss, sums = policy_loss(update, AlgorithmConfig(policy_loss=name, clip_ratio_high=0.3, **config))
    loss.sum().backward()
    assert logprobs.grad is not None
    return loss[0].tolist(), logprobs.grad[0].tolist(), sums


def test_ppo():
    # unclipped; high clip (-2·1.3); pessimistic (2·1.5); pessimistic (-2·0.5); low clip (2·0.8); dual clip (2·3); high clip
    ratios, advantages = [1.0, 1.5, 1.5, 0.5, 0.5, 4.0, 4.0], [2.0, 2.0, -2.0, 2.0, -2.0, -2.0, 2.0]
    loss, gradient, sums = losses("ppo", ratios, advantages)
    assert loss == pytest.approx([-2.0, -2.6, 3.0, -1.0, 1.6, 6.0, -2.6], abs=1e-5)
    assert gradient == pytest.approx([-2.0, 0, 3.0, -1.0, 0, 0, 0], abs=1e-5)
    assert sums["pg_clipfrac"] == 3
    assert sums["pg_clipfrac_lower"] == 1
    # -(ln 1.5 + ln 1.5 + ln 0.5 + ln 0.5 + ln 4 + ln 4) = -(2 ln 1.5 + 2 ln 2)
    assert sums["ppo_kl"].item() == pytest.approx(-2.197225, abs=1e-5)


def test_gspo():
    # The geometric mean of 4, 1 and 1/2 is 2^(1/3) = 1.259921, within the clip; that of 4, 1 and 1 is 1.587401.
    loss, gradient, sums = losses("gspo", [4.0, 1.0, 0.5], [2.0, 2.0, -1.0])
    assert loss == pytest.approx([-2.519842, -2.519842, 1.259921], abs=1e-5)
    assert gradient == pytest.approx([-2.519842, -2.519842, 1.259921], abs=1e-5)
    assert sums["pg_clipfrac"] == 0
    loss, gradient, sums = losses("gspo", [4.0, 1.0, 1.0], [2.0, 2.0, -1.0])
    assert loss == pytest.approx([-2.6, -2.6, 1.587401], abs=1e-5)
    assert gradient == pytest.approx([0, 0, 1.587401], abs=1e-5)
    assert sums["pg_clipfrac"] == 2


def test_cispo():
    # Log-probabilities ln 2 - 1, ln 0.25 - 1 and -1; weights 1.3, 0.8 and 1.
    loss, gradient, sums = losses("cispo", [2.0, 0.25, 1.0], [1.0, -1.0, 3.0])
    assert loss == pytest.approx([0.398909, -1.909035, 3.0], abs=1e-5)
    assert gradient == pytest.approx([-1.3, 0.8, -3.0], abs=1e-5)
    assert sums["pg_clipfrac"] == 2


def test_gpg():
    loss, gradient, _ = losses("gpg", [2.0, 0.25], [1.0, -3.0])
    assert loss == pytest.approx([0.306853, -7.158883], abs=1e-5)
    assert gradient == pytest.approx([-1.0, 3.0], abs=1e-5)


def test_covariance_losses_take_the_chosen_tokens_apart():
    ratios, advantages, chosen = [1.1, 1.1, 2.0], [1.0, 1.0, 1.0], [False, True, True]
    loss, gradient, sums = losses("clip_cov", ratios, advantages, chosen)
    assert loss == pytest.approx([-1.1, 0.0, 0.0], abs=1e-5)
    assert gradient == pytest.approx([-1.1, 0.0, 0.0], abs=1e-5)
    assert sums["pg_clipfrac"] == 2
    # -2 + 0.5 · ln 2 without a clip, and its derivative -2 + 0.5
    loss, gradient, _ = losses("kl_cov", ratios, advantages, chosen, kl_cov_coef=0.5)
    assert loss == pytest.approx([-1.1, -1.1 + 0.5 * 0.0953102, -2 + 0.5 * 0.693147], abs=1e-5)
    assert gradient == pytest.approx([-1.1, -0.6, -1.5], abs=1e-5)
    for name in ("clip_cov", "kl_cov"):  # a row of padding has no choice
        assert losses(name, ratios, advantages)[2]["pg_clipfrac"] == 0


def test_value_loss():
    values, old, returns = [1.0, 2.0, -2.0, 0.2], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]
    # moved to 0.5: (0.5)²/2 beats 0; (1)²/2 beats (0.5 - 1)²/2; (-3)²/2; within the range: (0.8)²/2
    loss, stats = value_loss(
        torch.tensor([values]), torch.tensor([old]), torch.tensor([returns]), torch.ones(1, 4, dtype=torch.bool), 0.5
    )
    assert loss[0].tolist() == pytest.approx([0.125, 0.5, 4.5, 0.32], abs=1e-6)
    assert stats["vf_clipfrac"] == 1
    assert stats["vpred_mean"].item() == pytest.approx(1.2, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 5, 1 / 5, 0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0]),
        ("seq-mean-token-mean", [1 / 8, 1 / 2, 0]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 0]),
    ],
)
def test_row_weights(mode, expected):
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert row_weights(mask, mode, 10.0).tolist() == pytest.approx(expected)
