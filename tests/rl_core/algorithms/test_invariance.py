"""Nothing depends on micro-batches, ranks, padding, the order of rows, or on what stands where the mask is false."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rl_core import algorithms
from rl_core.config.algorithm import ESTIMATORS, AlgorithmConfig
from tests.rl_core.algorithms.ragged import Ragged, ragged

LOSSES = ["ppo", "gspo", "cispo", "gpg", "clip_cov", "kl_cov"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
COVARIANCE = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "kl_cov_ratio": 0.2}


def chosen_of(case: Ragged, config: AlgorithmConfig) -> Tensor | None:
    if not algorithms.needs_whole_mini_batch(config):
        return None
    names = ("logprobs", "old_logprobs", "advantages")
    return algorithms.chosen_tokens(*(case.tensors[name] for name in names), case.mask, case.tensors["draws"], config)


def per_token(case: Ragged, config: AlgorithmConfig, chosen: Tensor | None, logprobs: Tensor, values: Tensor) -> Tensor:
    """[B, R]: all that an actor and a critic are charged, importance weights included."""
    tensors, mask = case.tensors, case.mask
    update = algorithms.Update(
        logprobs=logprobs,
        old_logprobs=tensors["old_logprobs"],
        advantages=tensors["advantages"],
        mask=mask,
        chosen=chosen,
    )
    loss, _ = algorithms.policy_loss(update, config)
    weights, _ = algorithms.rollout_weights(tensors["old_logprobs"], tensors["rollout_logprobs"], mask, config)
    assert weights is not None
    loss = loss * weights + 0.1 * algorithms.kl(logprobs, tensors["ref_logprobs"], mask, "k3")
    critic, _ = algorithms.value_loss(values, tensors["values"], tensors["returns"], mask, 0.4)
    return loss + critic + 0.01 * algorithms.entropy_loss(logprobs, mask)


def leaves(case: Ragged) -> tuple[Tensor, Tensor]:
    return case.tensors["logprobs"].clone().requires_grad_(), case.tensors["new_values"].clone().requires_grad_()


def part(case: Ragged, rows: Tensor) -> Ragged:
    return Ragged(case.mask[rows], case.group[rows], {name: tensor[rows] for name, tensor in case.tensors.items()})


def splits(seed: int) -> Iterator[list[Tensor]]:
    """Ways of cutting twelve rows: one by one, and at random into ranks and these into micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    yield list(torch.arange(12).split(1))
    for ranks, size in [(1, 5), (3, 2)]:
        order = torch.randperm(12, generator=generator)
        yield [micro for rank in order.tensor_split(ranks) for micro in rank.split(size)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_depend_on_micro_batches_and_ranks(name, mode):
    case = ragged(1)
    config = AlgorithmConfig(policy_loss=name, rollout_is="sequence", **COVARIANCE)
    chosen, weights = chosen_of(case, config), algorithms.row_weights(case.mask, mode, 9.0)
    logprobs, values = leaves(case)
    whole = (per_token(case, config, chosen, logprobs, values).sum(dim=1) * weights).sum()
    whole.backward()
    for split in splits(seed=2):
        cut_logprobs, cut_values = leaves(case)
        total = torch.zeros(())
        for rows in split:
            part_chosen = None if chosen is None else chosen[rows]
            loss = per_token(part(case, rows), config, part_chosen, cut_logprobs[rows], cut_values[rows])
            loss = (loss.sum(dim=1) * weights[rows]).sum()
            loss.backward()
            total = total + loss.detach()
        assert total.item() == pytest.approx(whole.item(), abs=1e-12)
        assert torch.allclose(cut_logprobs.grad, logprobs.grad, rtol=0, atol=1e-12)
        assert torch.allclose(cut_values.grad, values.grad, rtol=0, atol=1e-12)


def widened(case: Ragged, fill: float) -> tuple[Ragged, Tensor]:
    """The same rows with columns of padding before, among and behind their own, and the own columns' places."""
    places = torch.tensor([2, 3, 4, 6, 7, 8, 11])

    def wide(tensor: Tensor, value: float) -> Tensor:
        result = torch.full((tensor.shape[0], 15), value, dtype=tensor.dtype)
        result[:, places] = tensor
        return result

    tensors = {name: wide(tensor, fill) for name, tensor in case.tensors.items()}
    return Ragged(wide(case.mask, False), case.group, tensors), places


def soiled(case: Ragged, garbage: float) -> Ragged:
    """The same with garbage wherever the mask is false."""
    return Ragged(case.mask, case.group, {name: torch.where(case.mask, t, garbage) for name, t in case.tensors.items()})


@pytest.mark.parametrize("fill", [0.0, 3.0, math.nan])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_do_not_depend_on_padding(name, fill):
    case = ragged(3)
    wide, places = widened(case, fill)
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8)
    for narrow_part, wide_part in zip(*(algorithms.estimate(c.signals(), config) for c in (case, wide)), strict=True):
        assert torch.allclose(wide_part[:, places], narrow_part, rtol=0, atol=1e-12)
        assert not wide_part[~wide.mask].any()
    assert torch.allclose(
        algorithms.whiten(wide.tensors["values"], wide.mask)[:, places],
        algorithms.whiten(case.tensors["values"], case.mask),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("fill", [0.0, 3.0, math.nan])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_do_not_depend_on_padding(name, fill):
    case = ragged(4)
    wide, places = widened(case, fill)
    config = AlgorithmConfig(policy_loss=name, rollout_is="sequence", **COVARIANCE)
    narrow_leaves, wide_leaves = leaves(case), leaves(wide)
    chosen, wide_chosen = chosen_of(case, config), chosen_of(wide, config)
    if chosen is not None:
        assert chosen.any()
        assert torch.equal(wide_chosen[:, places], chosen)
        assert wide_chosen.sum() == chosen.sum()
    narrow = per_token(case, config, chosen, *narrow_leaves)
    widest = per_token(wide, config, wide_chosen, *wide_leaves)
    narrow.sum().backward()
    widest.sum().backward()
    assert torch.allclose(widest[:, places], narrow, rtol=0, atol=1e-12)
    assert not widest[~wide.mask].any()
    for ours, theirs in zip(wide_leaves, narrow_leaves, strict=True):
        assert torch.allclose(ours.grad[:, places], theirs.grad, rtol=0, atol=1e-12)
        assert not ours.grad[~wide.mask].any()
    for mode in MODES:
        assert torch.equal(algorithms.row_weights(wide.mask, mode, 9.0), algorithms.row_weights(case.mask, mode, 9.0))


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e300])
def test_garbage_behind_the_mask_does_not_leak(garbage):
    case = ragged(5)
    soil = soiled(case, garbage)
    for name in ESTIMATORS:
        config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8)
        for clean, dirty in zip(*(algorithms.estimate(c.signals(), config) for c in (case, soil)), strict=True):
            assert torch.equal(clean, dirty)
    for name in LOSSES:
        config = AlgorithmConfig(policy_loss=name, rollout_is="token", **COVARIANCE)
        chosen, dirty_leaves, clean_leaves = chosen_of(case, config), leaves(soil), leaves(case)
        assert chosen is None or torch.equal(chosen, chosen_of(soil, config))
        clean, dirty = per_token(case, config, chosen, *clean_leaves), per_token(soil, config, chosen, *dirty_leaves)
        clean.sum().backward()
        dirty.sum().backward()
        assert torch.equal(clean, dirty)
        for ours, theirs in zip(dirty_leaves, clean_leaves, strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        _, sums = algorithms.policy_loss(soil.update(chosen), config)
        assert all(total.isfinite() for total in sums.values())
    for name in ("k1", "k2", "k3", "abs"):
        assert algorithms.kl(soil.tensors["logprobs"], soil.tensors["ref_logprobs"], soil.mask, name).isfinite().all()
    rewards = algorithms.token_rewards(soil.tensors["rewards"], soil.tensors["values"], 0.1, soil.mask)
    assert torch.equal(rewards, algorithms.token_rewards(case.tensors["rewards"], case.tensors["values"], 0.1, case.mask))
    _, metrics = algorithms.rollout_weights(
        soil.tensors["old_logprobs"], soil.tensors["rollout_logprobs"], soil.mask, AlgorithmConfig(rollout_is="sequence")
    )
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_do_not_depend_on_the_order_of_rows_and_the_numbers_of_prompts(name):
    case, order = ragged(6), torch.randperm(12, generator=torch.Generator().manual_seed(0))
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8)
    signals, shuffled = case.signals(), part(case, order).signals()
    renumbered = algorithms.Signals(
        rewards=shuffled.rewards,
        mask=shuffled.mask,
        group=7 - 3 * shuffled.group,
        values=shuffled.values,
        baseline=shuffled.baseline,
    )
    advantages, _ = algorithms.estimate(signals, config)
    assert torch.allclose(algorithms.estimate(renumbered, config)[0], advantages[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_far_ratio_stays_finite(name):
    logprobs = torch.tensor([[0.0, 0.0, -200.0], [0.0, 0.0, 0.0]], requires_grad=True)
    update = algorithms.Update(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-200.0, -200.0, 0.0], [-200.0, -200.0, -200.0]]),
        advantages=torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]]),
        mask=torch.ones(2, 3, dtype=torch.bool),
        chosen=torch.tensor([[False, True, False], [False, False, True]]),
    )
    loss, sums = algorithms.policy_loss(update, AlgorithmConfig(policy_loss=name))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert all(total.isfinite() for total in sums.values())
