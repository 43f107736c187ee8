"""What is proposed fits, and nothing of it is needless."""

from pathlib import Path

import pytest

from rl_core.tools.plan import GIB, changed, make_plan
from rl_core.tools.plan_proposals import RANKS, propose
from tests.rl_core.tools.plans import LAYER, PARAMETERS, situation, wide_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(tmp_path_factory.mktemp("model"))


def test_as_few_changes_as_will_do(model: Path) -> None:
    at_ease = make_plan(situation(model, trainer__per_device_train_batch_size=1, fsdp__activation_checkpointing=True), 2**40)
    short = make_plan(at_ease.situation, int(GIB + at_ease.peak.total * 0.9 / 0.97))
    assert at_ease.fits
    assert not short.fits
    proposal = propose(short)
    assert proposal is not None
    assert proposal.changes == {"fsdp.optimizer_offload": True}
    assert not proposal.alters
    assert proposal.plan.fits
    assert proposal.plan.peak.total < short.peak.total
    assert proposal.plan.host > 0


def test_micro_batches_are_as_large_as_fits(model: Path) -> None:
    rows = {"trainer__per_device_train_batch_size": 64, "trainer__train_batch_size": 128, "trainer__ppo_mini_batch_size": 64}
    wide = make_plan(situation(model, fsdp__activation_checkpointing=True, rollout__max_new_tokens=448, **rows), 2**40)
    eight = changed(wide.situation, {"trainer.per_device_train_batch_size": 8})
    memory = int(GIB + (make_plan(eight, 2**40).peak.total + 1) / 0.97 + 1)
    short = make_plan(wide.situation, memory)
    assert not short.fits
    proposal = propose(short)
    assert proposal is not None
    assert proposal.changes == {"trainer.per_device_train_batch_size": 8}


def test_what_changes_the_result_is_said_and_nothing_is_needless(model: Path) -> None:
    plan = make_plan(situation(model), int(GIB * 1.05 + 2.2e9))
    assert not plan.fits
    proposal = propose(plan)
    assert proposal is not None
    assert proposal.alters
    assert {"actor.lora", "critic.lora"} <= set(proposal.changes)
    assert proposal.plan.fits
    for key in proposal.changes:
        fewer = {name: value for name, value in proposal.changes.items() if name != key}
        assert not make_plan(changed(plan.situation, fewer), plan.gpu_memory).fits


def test_more_gpus_where_all_else_is_done(tmp_path: Path) -> None:
    deep = wide_model(tmp_path / "deep", layers=8)
    done = {
        "fsdp__param_offload": True, "fsdp__optimizer_offload": True, "fsdp__activation_checkpointing": True,
        "trainer__per_device_train_batch_size": 1, "actor__lora": {"rank": 4}, "critic__lora": {"rank": 4},
        "actor__optimizer": "adamw8bit", "critic__optimizer": "adamw8bit",
    }  # fmt: skip
    parameters = PARAMETERS + 6 * LAYER
    plan = make_plan(situation(deep, **done), int(GIB + 5 * parameters / 0.97))  # three models in bfloat16 take 6
    assert not plan.fits
    proposal = propose(plan)
    assert proposal is not None
    assert proposal.changes == {RANKS: 2, "launch.nproc_per_node": 2}
    assert proposal.plan.fits
    assert not proposal.alters


def test_nothing_helps_where_the_rollout_weights_alone_are_too_large(model: Path) -> None:
    assert propose(make_plan(situation(model), int(1.2 * GIB))) is None
