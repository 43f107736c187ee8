import math

import pytest
import torch

from rl_core.algorithms import entropy_loss, policy_loss, value_loss

CLIP = {"low": 0.2, "high": 0.3, "c": 3.0}


def slow_policy_loss(logprob, old, advantage, low, high, c):
    ratio = math.exp(logprob - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * c) if advantage < 0 else loss


def slow_value_loss(value, old, target, cliprange):
    moved = min(max(value, old - cliprange), old + cliprange)
    return 0.5 * max((value - target) ** 2, (moved - target) ** 2)


def test_policy_loss_by_hand():
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 4.0, 4.0]
    advantages = [2.0, 2.0, -2.0, 2.0, -2.0, -2.0, 2.0]
    # unclipped; high clip (-2·1.3); pessimistic (2·1.5); pessimistic (-2·0.5); low clip (2·0.8); dual clip (2·3); high clip
    expected = [-2.0, -2.6, 3.0, -1.0, 1.6, 6.0, -2.6]
    logprobs = torch.tensor([ratios]).log() - 1
    loss, stats = policy_loss(
        logprobs, torch.full((1, 7), -1.0), torch.tensor([advantages]), torch.ones(1, 7, dtype=torch.bool), **CLIP
    )
    assert loss[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert stats["pg_clipfrac"] == 3
    assert stats["pg_clipfrac_lower"] == 1
    # -(ln 1.5 + ln 1.5 + ln 0.5 + ln 0.5 + ln 4 + ln 4) = -(2 ln 1.5 + 2 ln 2)
    assert stats["ppo_kl"].item() == pytest.approx(-2.197225, abs=1e-5)


def test_value_loss_by_hand():
    values, old, returns = [1.0, 2.0, -2.0, 0.2], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]
    # moved to 0.5: (0.5)²/2 beats 0; (1)²/2 beats (0.5 - 1)²/2; (-3)²/2; within the range: (0.8)²/2
    loss, stats = value_loss(
        torch.tensor([values]), torch.tensor([old]), torch.tensor([returns]), torch.ones(1, 4, dtype=torch.bool), 0.5
    )
    assert loss[0].tolist() == pytest.approx([0.125, 0.5, 4.5, 0.32], abs=1e-6)
    assert stats["vf_clipfrac"] == 1
    assert stats["vpred_mean"].item() == pytest.approx(1.2, abs=1e-6)


def ragged():
    torch.manual_seed(2)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    return mask, [torch.randn(4, 4) for _ in range(3)]


def test_losses_on_ragged_rows_equal_the_explicit_loop():
    mask, (a, b, c) = ragged()
    policy, policy_stats = policy_loss(a, b, c, mask, **CLIP)
    value, _ = value_loss(a, b, c, mask, 0.5)
    entropy = entropy_loss(a, mask)
    for row in range(4):
        for t in range(4):
            x, y, z = a[row, t].item(), b[row, t].item(), c[row, t].item()
            kept = bool(mask[row, t])
            assert policy[row, t].item() == pytest.approx(slow_policy_loss(x, y, z, **CLIP) if kept else 0, abs=1e-5)
            assert value[row, t].item() == pytest.approx(slow_value_loss(x, y, z, 0.5) if kept else 0, abs=1e-5)
            assert entropy[row, t].item() == pytest.approx(-x if kept else 0)
    kl = sum((b - a)[row, t].item() for row in range(4) for t in range(4) if mask[row, t])
    assert policy_stats["ppo_kl"].item() == pytest.approx(kl, abs=1e-5)


def losses(a, b, c, mask):
    policy, _ = policy_loss(a, b, c, mask, **CLIP)
    value, _ = value_loss(a, b, c, mask, 0.5)
    return policy + value + entropy_loss(a, mask)


def test_gradient_does_not_depend_on_micro_batching():
    mask, (a, b, c) = ragged()
    count = mask.sum()
    whole, cut = a.clone().requires_grad_(), a.clone().requires_grad_()
    (losses(whole, b, c, mask).sum() / count).backward()
    for rows in ([0], [1, 3], [2]):
        (losses(cut[rows], b[rows], c[rows], mask[rows]).sum() / count).backward()
    assert whole.grad is not None
    assert cut.grad is not None
    assert torch.allclose(whole.grad, cut.grad, atol=1e-7)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
def test_garbage_behind_the_mask_does_not_leak(garbage):
    mask, tensors = ragged()
    clean = tensors[0].clone().requires_grad_()
    losses(clean, tensors[1], tensors[2], mask).sum().backward()
    dirty = [torch.where(mask, tensor, torch.tensor(garbage)) for tensor in tensors]
    leaf = dirty[0].requires_grad_()
    result = losses(leaf, dirty[1], dirty[2], mask)
    result.sum().backward()
    assert torch.equal(result, losses(tensors[0], tensors[1], tensors[2], mask))
    assert leaf.grad is not None
    assert clean.grad is not None
    assert torch.equal(leaf.grad, clean.grad)


def test_a_far_ratio_stays_finite():
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.tensor([[-200.0, -200.0]]), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool), **CLIP
    )
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-1.3, 3.0])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]
    assert stats["ppo_kl"] == -40
