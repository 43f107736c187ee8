import math

import pytest
import torch

from rl_core.algorithms import kl

HALF, QUARTER = math.log(0.5), math.log(0.25)


def test_by_hand():
    # p = 1/2 against q = 1/4: d = ln 2; and the other way round: d = -ln 2.
    logprobs, reference = torch.tensor([[HALF, QUARTER]]), torch.tensor([[QUARTER, HALF]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert kl(logprobs, reference, mask, "k1").tolist()[0] == pytest.approx([0.693147, -0.693147], abs=1e-6)
    assert kl(logprobs, reference, mask, "k2").tolist()[0] == pytest.approx([0.240227, 0.240227], abs=1e-6)
    assert kl(logprobs, reference, mask, "abs").tolist()[0] == pytest.approx([0.693147, 0.693147], abs=1e-6)
    # k3: 1/2 - 1 + 0.693147 and 2 - 1 - 0.693147
    assert kl(logprobs, reference, mask, "k3").tolist()[0] == pytest.approx([0.193147, 0.306853], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased(estimator):
    """The expectation under the policy, summed over the whole vocabulary, is the KL."""
    torch.manual_seed(0)
    policy, reference = torch.randn(1, 7).log_softmax(1), torch.randn(1, 7).log_softmax(1)
    exact = sum(math.exp(p) * (p - q) for p, q in zip(policy[0].tolist(), reference[0].tolist(), strict=True))
    estimate = kl(policy, reference, torch.ones(1, 7, dtype=torch.bool), estimator)
    assert (policy.exp() * estimate).sum().item() == pytest.approx(exact, abs=1e-5)


def test_k3_is_bounded():
    far = kl(torch.tensor([[-100.0, 0.0]]), torch.tensor([[0.0, -100.0]]), torch.ones(1, 2, dtype=torch.bool), "k3")
    assert far.tolist() == [[10.0, 10.0]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
def test_garbage_behind_the_mask_does_not_leak(estimator, garbage):
    logprobs = torch.tensor([[-1.0, garbage, -2.0]], requires_grad=True)
    result = kl(logprobs, torch.tensor([[-1.5, -1.0, garbage]]), torch.tensor([[True, False, False]]), estimator)
    result.sum().backward()
    assert result[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad[0, 1:].tolist() == [0.0, 0.0]
    assert logprobs.grad[0, 0].isfinite()
