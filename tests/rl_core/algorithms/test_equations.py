"""Every estimator, loss, aggregation and KL against `equations.py`, on random ragged masks."""

import math

import pytest
import torch

from rl_core import algorithms
from rl_core.config.algorithm import AlgorithmConfig
from tests.rl_core.algorithms import equations
from tests.rl_core.algorithms.ragged import Ragged, ragged

SEEDS = range(5)
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def close(ours, theirs, tolerance=1e-9):
    return torch.allclose(ours, torch.as_tensor(theirs, dtype=ours.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.7, 0.0), (0.0, 0.5)])
def test_advantages_from_what_follows(seed, gamma, lam):
    case, signals = ragged(seed), ragged(seed).signals()
    rewards, values = case.rows("rewards"), case.rows("values")
    config = {"gamma": gamma, "lam": lam}

    expected = [equations.gae(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
    advantages, returns = algorithms.estimate(signals, AlgorithmConfig(adv_estimator="gae", **config))
    assert close(advantages, case.spread(expected))
    assert close(
        returns, case.spread([[a + v for a, v in zip(*pair, strict=True)] for pair in zip(expected, values, strict=True)])
    )

    expected = case.spread([equations.following(row, gamma) for row in rewards])
    advantages, returns = algorithms.estimate(signals, AlgorithmConfig(adv_estimator="reinforce_plus_plus", **config))
    assert close(advantages, expected)
    assert close(returns, expected)

    assert signals.baseline is not None
    less = [[g - b for g in equations.following(r, 1.0)] for r, b in zip(rewards, signals.baseline.tolist(), strict=True)]
    advantages, _ = algorithms.estimate(signals, AlgorithmConfig(adv_estimator="remax", **config))
    assert close(advantages, case.spread(less))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("config", "equation"),
    [
        ({"adv_estimator": "grpo"}, equations.grpo),
        ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, equations.centred),
        ({"adv_estimator": "reinforce_plus_plus_baseline"}, equations.centred),
        ({"adv_estimator": "rloo"}, equations.rloo),
        ({"adv_estimator": "opo"}, equations.opo),
    ],
)
def test_advantages_among_the_responses_to_a_prompt(seed, config, equation):
    case = ragged(seed)
    scores, lengths = [sum(row) for row in case.rows("rewards")], case.mask.sum(dim=1).tolist()
    expected = [0.0] * len(scores)
    for number in set(case.group.tolist()):
        members = [i for i in range(len(scores)) if case.group[i] == number and lengths[i]]  # empty ones take no part
        if members:
            for i, advantage in zip(members, equation([scores[i] for i in members], [lengths[i] for i in members]), strict=True):
                expected[i] = advantage
    advantages, _ = algorithms.estimate(case.signals(), AlgorithmConfig(**config))
    assert close(advantages, case.spread([[a] * length for a, length in zip(expected, lengths, strict=True)]))


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_equal_scores_have_no_advantage(name, count):
    # 0.1 is no float32, and a mean of several of them is not one of them: divided by 1e-6 that would be seen.
    rewards = torch.zeros(count, 4)
    rewards[:, 3] = 0.1
    signals = algorithms.Signals(rewards=rewards, mask=torch.ones(count, 4).bool(), group=torch.zeros(count).long())
    advantages, _ = algorithms.estimate(signals, AlgorithmConfig(adv_estimator=name))
    assert advantages.abs().max() < 1e-6


def losses_of(case: Ragged, config: AlgorithmConfig, chosen=None):
    leaf = case.tensors["logprobs"].clone().requires_grad_()
    update = algorithms.Update(
        logprobs=leaf,
        old_logprobs=case.tensors["old_logprobs"],
        advantages=case.tensors["advantages"],
        mask=case.mask,
        chosen=chosen,
    )
    loss, sums = algorithms.policy_loss(update, config)
    loss.sum().backward()
    assert not any(total.requires_grad for total in sums.values())
    return loss.detach(), leaf.grad, sums


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", equations.POLICY_LOSSES)
def test_policy_losses_and_their_gradients(seed, name):
    case = ragged(seed)
    config = AlgorithmConfig(policy_loss=name, clip_ratio_low=0.3, clip_ratio_high=0.5, clip_ratio_c=2.5)
    loss, gradient, sums = losses_of(case, config)
    names = ("logprobs", "old_logprobs", "advantages")
    rows = [
        equations.POLICY_LOSSES[name](*row, 0.3, 0.5, 2.5) if row[0] else [] for row in zip(*map(case.rows, names), strict=True)
    ]
    assert close(loss, case.spread([[lost for lost, _ in row] for row in rows]))
    assert close(gradient, case.spread([[slope for _, slope in row] for row in rows]))
    old, new = case.rows("old_logprobs"), case.rows("logprobs")
    assert close(sums["ppo_kl"], sum(map(sum, old)) - sum(map(sum, new)))
    if name == "gspo":
        assert sums["pg_clipfrac"] == sum(slope == 0 for row in rows for _, slope in row)


def tokens(case: Ragged, name: str):
    return [number for row in case.rows(name) for number in row]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_clip_cov(seed, share):
    case = ragged(seed)
    names = ("logprobs", "old_logprobs", "advantages")
    config = AlgorithmConfig(policy_loss="clip_cov", clip_cov_ratio=share, clip_cov_lb=0.1, clip_cov_ub=1.5)
    chosen = algorithms.chosen_tokens(*(case.tensors[name] for name in names), case.mask, case.tensors["draws"], config)
    new, old, advantages, draws = (tokens(case, name) for name in (*names, "draws"))
    lost = [equations.surrogate(math.exp(x - y), a, 0.2, 0.2) for x, y, a in zip(new, old, advantages, strict=True)]
    able = [
        i for i, c in enumerate(equations.covariances(new, advantages)) if 0.1 < c < 1.5 and lost[i][1] != 0
    ]  # the clip leaves them a gradient
    count = max(1, int(share * len(new))) if share else 0
    expected = set(sorted(able, key=lambda i: draws[i])[:count])
    assert set(chosen[case.mask].nonzero()[:, 0].tolist()) == expected
    assert not chosen[~case.mask].any()
    loss, gradient, sums = losses_of(case, config, chosen)
    assert close(loss[case.mask], [0.0 if i in expected else lost[i][0] for i in range(len(new))])
    assert close(gradient[case.mask], [0.0 if i in expected else lost[i][1] for i in range(len(new))])
    assert sums["pg_clipfrac"] == len(expected)
    assert not loss[~case.mask].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_kl_cov(seed, share):
    case = ragged(seed)
    names = ("logprobs", "old_logprobs", "advantages")
    config = AlgorithmConfig(policy_loss="kl_cov", kl_cov_ratio=share, kl_cov_coef=0.6)
    chosen = algorithms.chosen_tokens(*(case.tensors[name] for name in names), case.mask, case.tensors["draws"], config)
    new, old, advantages = (tokens(case, name) for name in names)
    covariance = equations.covariances(new, advantages)
    count = max(1, int(share * len(new))) if share else 0
    expected = set(sorted(range(len(new)), key=lambda i: -covariance[i])[:count])
    assert set(chosen[case.mask].nonzero()[:, 0].tolist()) == expected
    loss, gradient, sums = losses_of(case, config, chosen)
    charged = [0.6 if i in expected else 0.0 for i in range(len(new))]
    rows = list(zip(new, old, advantages, charged, strict=True))
    assert close(loss[case.mask], [-a * math.exp(x - y) + w * abs(x - y) for x, y, a, w in rows])
    assert close(gradient[case.mask], [-a * math.exp(x - y) + w * math.copysign(1, x - y) for x, y, a, w in rows])
    assert sums["pg_clipfrac"] == len(expected)
    assert not loss[~case.mask].any()


def test_only_the_covariance_losses_need_the_whole_mini_batch():
    needing = {name for name in ("ppo", "gspo", "cispo", "gpg", "clip_cov", "kl_cov") if needs(name)}
    assert needing == {"clip_cov", "kl_cov"}


def needs(name):
    return algorithms.needs_whole_mini_batch(AlgorithmConfig(policy_loss=name))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_and_entropy_loss(seed):
    case = ragged(seed)
    names = ("new_values", "values", "returns")
    loss, sums = algorithms.value_loss(*(case.tensors[name] for name in names), case.mask, 0.4)
    rows = [list(zip(*row, strict=True)) for row in zip(*map(case.rows, names), strict=True)]
    assert close(loss, case.spread([[equations.value_loss(*token, 0.4) for token in row] for row in rows]))
    assert close(sums["vpred_mean"], sum(map(sum, case.rows("new_values"))))
    assert close(algorithms.entropy_loss(case.tensors["values"], case.mask), -case.spread(case.rows("values")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", equations.KL)
def test_kl(seed, name):
    case = ragged(seed)
    value = algorithms.kl(case.tensors["logprobs"], case.tensors["ref_logprobs"], case.mask, name)
    pairs = zip(case.rows("logprobs"), case.rows("ref_logprobs"), strict=True)
    expected = [[equations.KL[name](x - y) for x, y in zip(*rows, strict=True)] for rows in pairs]
    assert close(value, case.spread(expected))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_aggregation(seed, mode):
    case = ragged(seed)
    weights = algorithms.row_weights(case.mask, mode, 11.0)
    losses = torch.where(case.mask, case.tensors["values"], 0.0)
    expected = equations.aggregate(case.rows("values"), mode, 11.0)
    assert close((losses.sum(dim=1) * weights).sum(), expected, 1e-6)
    assert weights.dtype == torch.float32
    assert weights[4] == 0


@pytest.mark.parametrize("mode", MODES)
def test_without_any_token_all_weights_are_nothing(mode):
    assert algorithms.row_weights(torch.zeros(3, 2).bool(), mode, 4.0).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["none", "token", "sequence"])
def test_rollout_correction(seed, level):
    case = ragged(seed)
    config = AlgorithmConfig(rollout_is=level, rollout_is_threshold=1.7)
    given = case.tensors["old_logprobs"], case.tensors["rollout_logprobs"]
    weights, metrics = algorithms.rollout_weights(*given, case.mask, config)
    pairs = zip(case.rows("old_logprobs"), case.rows("rollout_logprobs"), strict=True)
    rows = [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs]
    flat = [d for row in rows for d in row]
    assert metrics["kl"] == pytest.approx(-sum(flat) / len(flat))
    assert metrics["k3_kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in flat) / len(flat))
    if level == "none":
        assert weights is None
        return
    ratios = [[math.exp(sum(row) if level == "sequence" else d) for d in row] for row in rows]
    assert close(weights, case.spread([[min(ratio, 1.7) for ratio in row] for row in ratios]))
    every = [ratio for row in ratios for ratio in row]
    assert metrics["rollout_is_mean"] == pytest.approx(sum(min(ratio, 1.7) for ratio in every) / len(every))
    assert metrics["rollout_is_min"] == pytest.approx(min(every))
    assert metrics["rollout_is_max"] == pytest.approx(max(every))
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(sum(r > 1.7 for r in every) / len(every))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction_of_what_is_far_apart(level):
    old, rollout = torch.tensor([[0.0, 0.0], [-900.0, 0.0]]), torch.tensor([[-900.0, -900.0], [0.0, 0.0]])
    weights, metrics = algorithms.rollout_weights(old, rollout, torch.ones(2, 2).bool(), AlgorithmConfig(rollout_is=level))
    least = math.exp(-20)
    assert close(weights, [[2.0, 2.0], [least, least if level == "sequence" else 1.0]], 1e-6)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["rollout_is_max"] == pytest.approx(math.exp(20))


def test_rollout_correction_without_any_token():
    nothing, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3).bool()
    weights, metrics = algorithms.rollout_weights(nothing, nothing, mask, AlgorithmConfig(rollout_is="token"))
    assert weights is not None
    assert not weights.any()
    assert metrics == {}


def test_the_kl_controller_by_hand():
    adaptive = AlgorithmConfig(kl_controller="adaptive", kl_target=0.1, kl_horizon=1000)
    assert algorithms.next_kl_coef(0.5, 0.11, 200, adaptive) == pytest.approx(0.5 * (1 + 0.1 * 0.2))
    assert algorithms.next_kl_coef(0.5, 0.09, 200, adaptive) == pytest.approx(0.5 * (1 - 0.1 * 0.2))
    assert algorithms.next_kl_coef(0.5, 9.0, 200, adaptive) == pytest.approx(0.5 * (1 + 0.2 * 0.2))
    assert algorithms.next_kl_coef(0.5, 0.0, 200, adaptive) == pytest.approx(0.5 * (1 - 0.2 * 0.2))
    # A step of more responses than the horizon counts as one of the horizon: the weight stays positive.
    assert algorithms.next_kl_coef(0.5, -3.0, 10**6, adaptive) == pytest.approx(0.4)
    assert algorithms.next_kl_coef(0.5, math.nan, 200, adaptive) == 0.5
    assert algorithms.next_kl_coef(0.5, 9.0, 200, AlgorithmConfig(kl_controller="fixed")) == 0.5
