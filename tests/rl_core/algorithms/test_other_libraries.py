"""The same inputs give the numbers that verl's and TRL's own functions gave (`data/README.md`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core import algorithms
from rl_core.config.algorithm import AlgorithmConfig

VERL, TRL = (json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text()) for name in ("verl", "trl"))
CLIPS: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
COVARIANCE: dict[str, Any] = {
    "clip_cov_ratio": 1.0,
    "clip_cov_lb": 0.05,
    "clip_cov_ub": 1.5,
    "kl_cov_ratio": 0.2,
    "kl_cov_coef": 0.7,
}
SCALE = 5.0
WITHOUT_DUAL_CLIP = {"clip_ratio_c": 1e6}


def given(library):
    made = {name: torch.tensor(value, dtype=torch.float64) for name, value in library["inputs"].items()}
    return made | {"mask": made["mask"].bool(), "group": made["group"].long()}


def named(library, prefix):
    return [name.removeprefix(f"{prefix} ") for name in library["outputs"] if name.startswith(f"{prefix} ")]


def same(ours, theirs):
    assert torch.allclose(ours.double(), torch.tensor(theirs, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", named(VERL, "advantages"))
def test_advantages_of_verl(name):
    inputs, theirs = given(VERL), VERL["outputs"][f"advantages {name}"]
    estimator, _, rest = name.partition(" ")
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=not rest)
    fields = ("rewards", "mask", "group", "values", "baseline")
    advantages, returns = algorithms.estimate(algorithms.Signals(**{field: inputs[field] for field in fields}), config)
    if config.whitens:
        advantages = algorithms.whiten(advantages, inputs["mask"])
    seen = inputs["mask"].double()  # verl leaves numbers under the mask
    same(advantages, (torch.tensor(theirs["advantages"]) * seen).tolist())
    if estimator != "reinforce_plus_plus_baseline":  # there verl returns the whitened advantages
        same(returns, (torch.tensor(theirs["returns"]) * seen).tolist())


def policy_loss(inputs, name, mode, **config):
    algorithm = AlgorithmConfig(policy_loss=name, **(CLIPS | COVARIANCE | config))
    logprobs, old, advantages, mask = (inputs[key] for key in ("logprobs", "old_logprobs", "advantages", "mask"))
    chosen = None
    if algorithms.needs_whole_mini_batch(algorithm):
        chosen = algorithms.chosen_tokens(logprobs, old, advantages, mask, torch.zeros_like(logprobs), algorithm)
    leaf = logprobs.clone().requires_grad_()
    update = algorithms.Update(logprobs=leaf, old_logprobs=old, advantages=advantages, mask=mask, chosen=chosen)
    loss, sums = algorithms.policy_loss(update, algorithm)
    return leaf, (loss.sum(dim=1) * algorithms.row_weights(mask, mode, SCALE)).sum(), sums


@pytest.mark.parametrize("case", named(VERL, "policy_loss"))
def test_policy_losses_of_verl(case):
    name, mode = case.split(" ")
    inputs, theirs = given(VERL), VERL["outputs"][f"policy_loss {case}"]
    leaf, loss, sums = policy_loss(inputs, name, mode)
    loss.backward()
    same(loss, theirs["loss"])
    same(leaf.grad, theirs["gradient"])
    for metric, value in theirs["metrics"].items():
        ours = metric.removeprefix("actor/")
        if name == "kl_cov":  # verl's ppo_kl is of absolute values there alone
            continue
        if ours in sums:
            same(sums[ours] / inputs["mask"].sum(), value)
        else:
            assert value == 0


@pytest.mark.parametrize("mode", named(VERL, "value_loss"))
def test_value_loss_of_verl(mode):
    inputs, theirs = given(VERL), VERL["outputs"][f"value_loss {mode}"]
    leaf = inputs["new_values"].clone().requires_grad_()
    loss, sums = algorithms.value_loss(leaf, inputs["values"], inputs["returns"], inputs["mask"], 0.4)
    total = (loss.sum(dim=1) * algorithms.row_weights(inputs["mask"], mode, SCALE)).sum()
    total.backward()
    same(total, theirs["loss"])
    same(leaf.grad, theirs["gradient"])
    same(sums["vf_clipfrac"] / inputs["mask"].sum(), theirs["vf_clipfrac"])


@pytest.mark.parametrize("name", named(VERL, "kl"))
def test_kl_of_verl(name):
    inputs, theirs = given(VERL), VERL["outputs"][f"kl {name}"]
    leaf = inputs["logprobs"].clone().requires_grad_()
    value = algorithms.kl(leaf, inputs["ref_logprobs"], inputs["mask"], name)
    value.sum().backward()
    same(value, (torch.tensor(theirs["value"]) * inputs["mask"]).tolist())
    same(leaf.grad, theirs["gradient"])


@pytest.mark.parametrize("level", named(VERL, "rollout"))
def test_rollout_correction_of_verl(level):
    inputs, theirs = given(VERL), VERL["outputs"][f"rollout {level}"]
    config = AlgorithmConfig(rollout_is=level, rollout_is_threshold=2.0)
    weights, metrics = algorithms.rollout_weights(inputs["old_logprobs"], inputs["rollout_logprobs"], inputs["mask"], config)
    same(weights, theirs["weights"])
    for name in ("kl", "k3_kl", "rollout_is_mean"):
        assert metrics[name] == pytest.approx(theirs["metrics"][f"rollout_corr/{name}"], abs=1e-6)
    if level == "token":  # a sequence's weight counts once in verl, and an empty one's too; its greatest weight is the truncated
        for name in ("rollout_is_min", "rollout_is_ratio_fraction_high"):
            assert metrics[name] == pytest.approx(theirs["metrics"][f"rollout_corr/{name}"], abs=1e-6)


def test_controller_and_whitening_of_verl():
    config = AlgorithmConfig(kl_controller="adaptive", kl_target=0.1, kl_horizon=10000)
    for case in VERL["outputs"]["controller"]:
        assert algorithms.next_kl_coef(case["coef"], case["kl"], case["responses"], config) == pytest.approx(case["next"])
    inputs = given(VERL)
    same(algorithms.whiten(inputs["advantages"], inputs["mask"]), VERL["outputs"]["whitened"])


@pytest.mark.parametrize("name", ["grpo", "grpo without std", "rloo"])
def test_advantages_of_trl(name):
    theirs = TRL["outputs"]["groups"]
    scores = torch.tensor(theirs["scores"], dtype=torch.float64)
    mask = torch.ones(scores.numel(), 3).bool()
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[:, 2] = scores.flatten()
    group = torch.arange(len(scores)).repeat_interleave(scores.shape[1])
    estimator, _, rest = name.partition(" ")
    config = AlgorithmConfig(adv_estimator=estimator, norm_adv_by_std_in_grpo=not rest)
    advantages, _ = algorithms.estimate(algorithms.Signals(rewards=rewards, mask=mask, group=group), config)
    ours = advantages[:, 0]
    if name == "grpo":  # TRL adds 1e-4 to the standard deviation, verl 1e-6
        deviations = torch.tensor(theirs["deviations"], dtype=torch.float64)
        ours = ours * (deviations + 1e-6) / (deviations + 1e-4)
    same(ours, theirs[name])


@pytest.mark.parametrize("case", named(TRL, "loss"))
def test_policy_losses_of_trl(case):
    name, mode, *rest = case.split(" ")
    theirs, rows = TRL["outputs"][f"loss {case}"], TRL["outputs"]["rows"]
    inputs = {key: value[rows] for key, value in given(TRL).items()}
    inputs["advantages"] = inputs["advantages"][:, :1].expand_as(inputs["logprobs"])
    config = {} if "dual" in rest else WITHOUT_DUAL_CLIP
    leaf, loss, _ = policy_loss(inputs, name, mode, **config | ({"clip_ratio_low": 1.0} if name == "cispo" else {}))
    if "kl" in rest:
        # The stand-in of the reference (data/make_trl.py), at a weight of 0.1.
        charged = algorithms.kl(leaf, inputs["rollout_logprobs"], inputs["mask"], "k3")
        loss = loss + 0.1 * (charged.sum(dim=1) * algorithms.row_weights(inputs["mask"], mode, SCALE)).sum()
    loss.backward()
    same(loss, theirs["loss"])
    same(leaf.grad, theirs["gradient"])


@pytest.mark.parametrize("level", named(TRL, "importance"))
def test_rollout_correction_of_trl(level):
    inputs = given(TRL)
    config = AlgorithmConfig(rollout_is=level, rollout_is_threshold=2.0)
    weights, _ = algorithms.rollout_weights(inputs["old_logprobs"], inputs["rollout_logprobs"], inputs["mask"], config)
    theirs = torch.tensor(TRL["outputs"][f"importance {level}"]).expand_as(inputs["mask"])
    same(weights, torch.where(inputs["mask"], theirs, 0.0).tolist())  # what does not count weighs 1 there


def test_ppo_of_trl():
    theirs, rows = TRL["outputs"]["ppo"], TRL["outputs"]["plain rows"]
    inputs = {key: value[rows] for key, value in given(TRL).items()}
    mask = inputs["mask"]
    advantages, returns = algorithms.gae(inputs["rewards"], inputs["values"], mask, 0.9, 0.8)
    same(algorithms.whiten(advantages, mask), theirs["advantages"])
    same(returns, theirs["returns"])
    leaf, loss, _ = policy_loss(inputs, "ppo", "token-mean", clip_ratio_high=0.2, **WITHOUT_DUAL_CLIP)
    loss.backward()
    same(loss, theirs["pg_loss"])
    same(leaf.grad, theirs["policy gradient"])
    values = inputs["new_values"].clone().requires_grad_()
    per_token, sums = algorithms.value_loss(values, inputs["values"], inputs["returns"], mask, 0.4)
    total = (per_token.sum(dim=1) * algorithms.row_weights(mask, "token-mean", SCALE)).sum()
    total.backward()
    same(total, theirs["vf_loss"])
    same(sums["vf_clipfrac"] / mask.sum(), theirs["vf_clipfrac"])
    same(values.grad, theirs["value gradient"])
