"""A training goes on from its checkpoint wherever its roles then are, and knows while it trains what an evaluation would find."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_core.checkpoint.dcp import stored_tensors
from tests.ranks import run_ranks
from tests.rl_core import tiny_runs
from tests.rl_core.test_matrix import METRICS
from tests.rl_core.tiny_runs import built

inputs = tiny_runs.inputs
TWO_STEPS: dict[str, Any] = {
    "trainer.max_steps": 2, "checkpoint.save_steps": 1, "actor.lr_scheduler_type": "linear", "actor.min_lr_ratio": 0.5,
}  # fmt: skip
APART = {"model_mapping.actor": [1], "model_mapping.critic": [0], "fsdp.strategy": "single"}
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"actor.lora": {"rank": 4}},
    "moments in 8 bits": {"actor.optimizer": "adamw8bit", "critic.optimizer": "adamw8bit"},
}
ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {"fsdp.strategy": "ddp"},
    "two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2},
}
VALIDATED = {
    "evaluation.every_steps": 1, "evaluation.prompts": 9, "evaluation.success_reward": 0.8, "evaluation.temperature": 1.0,
    "actor.adam_epsilon": 1e-8,
}  # fmt: skip
Ran = dict[str, tuple[int, dict[str, float], dict[str, torch.Tensor]]]


def go(rank: int, directory: Path, runs: dict[str, dict[str, Any]]) -> Ran:
    """Of each run the step that it began with, the metrics of its last step, and every tensor of a checkpoint made then (those
    that this rank has a part of). A run called `KIND, …` goes on from the first checkpoint of the run KIND."""
    from rl_core.ppo import train

    done = {}
    for name, overrides in runs.items():
        kind, step = name.split(",")[0], Path("checkpoints", "step_000001")
        if name != kind and rank == 0:
            shutil.copytree(directory / kind / step, directory / name / step)
        dist.barrier()
        run = built(rank, directory, name, TWO_STEPS | KINDS[kind] | overrides)
        train(run)
        tensors = {
            key: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for key, tensor in run.tensors().items()
        }
        rows = (directory / name / "metrics.jsonl").read_text().splitlines() if rank == 0 else ["{}"]
        done[name] = (run.first_step, json.loads(rows[-1]), tensors)
    return done


@pytest.fixture(scope="module")
def on_two(inputs: Path) -> list[Ran]:
    """By rank: of each kind two steps with actor and critic apart, then the second of them again in other places."""
    runs = {kind: APART for kind in KINDS}
    runs |= {f"{kind}, {name}": overrides for kind in KINDS for name, overrides in ON_TWO.items()}
    runs["all weights, the other way round"] = APART | {"model_mapping.actor": [0], "model_mapping.critic": [1]}
    return run_ranks(go, 2, inputs, runs)


def compare(by_rank: list[Ran], on_two: list[Ran]) -> None:
    """The runs that went on are as the uninterrupted ones of their kinds."""
    for name in [name for name in by_rank[0] if name not in KINDS]:
        kind = name.split(",")[0]
        (_, metrics, critic), (_, _, actor) = (rank[kind] for rank in on_two)
        expected = actor | critic
        assert [rank[name][0] for rank in by_rank] == [1] * len(by_rank), "it began behind the checkpoint"
        for metric in METRICS:
            assert by_rank[0][name][1][metric] == pytest.approx(metrics[metric], rel=2e-4, abs=2e-6), f"{name}: {metric}"
        assert set().union(*(rank[name][2] for rank in by_rank)) == expected.keys(), name
        # Rounding decides between two codes of 8 bits, which are up to 1.4 % of a block's largest moment from each other.
        coded = kind == "moments in 8 bits"
        for key, tensor in [item for rank in by_rank for item in rank[name][2].items()]:
            moment = "_optimizer." in key
            tolerance = (0.02 if coded else 1e-4) * expected[key].abs().max() if moment else 2e-6
            assert (tensor - expected[key]).abs().max() <= tolerance, f"{name}: {key}"


def test_a_run_goes_on_in_other_places_as_if_it_had_never_stopped(on_two: list[Ran]) -> None:
    compare(on_two, on_two)


def test_a_run_goes_on_on_one_rank(inputs: Path, on_two: list[Ran]) -> None:
    compare(run_ranks(go, 1, inputs, {f"{kind}, one rank": {"fsdp.strategy": "single"} for kind in KINDS}), on_two)


def test_a_checkpoint_of_adapters_holds_no_base_weights(inputs: Path, on_two: list[Ran]) -> None:
    stored = stored_tensors(inputs / "adapters" / "checkpoints" / "step_000001" / "tensors")
    of_actor = [name for name in stored if name.startswith("actor")]
    assert of_actor
    assert all(".lora_A." in name or ".lora_B." in name for name in of_actor)
    assert any(name.startswith("critic.backbone.") for name in stored), "the critic has no adapters"


def save_and_restore(rank: int, directory: Path) -> dict[str, dict[str, float | None]]:
    """What learners know beside tensors, saved where each is on a rank of its own, and taken over where all have both."""
    half = {"model.torch_dtype": "float16", "trainer.max_steps": 2}
    run = built(rank, directory, "state", half | APART)
    for learner, state in ((run.actor, (2, 1024.0, 7)), (run.critic, (1, 2048.0, 9))):
        if learner.module is not None:
            learner.skipped, learner.scale, learner.scaled_steps = state
    run.save(1)
    run.saver.wait()
    again = built(rank, directory, "state", half)
    return {learner.name: learner.state for learner in (again.actor, again.critic)}


def validated(rank: int, directory: Path) -> tuple[list[dict[str, float]], list[list[float]]]:
    """The metrics of two steps of an actor on rank 1, and the rewards that an evaluation of the policy after each finds."""
    from rl_core.checkpoint.export import export_policy
    from rl_core.data.prompts import Prompts
    from rl_core.evaluate import evaluate
    from rl_core.ppo import train

    run = built(rank, directory, "validated", TWO_STEPS | APART | VALIDATED)
    train(run)
    found = []
    for step in (1, 2):
        policy, tensors = directory / f"policy-{step}", run.checkpoints.path(step) / "tensors"
        if rank == 0:
            policy.mkdir()
            export_policy(tensors, "actor.", directory / "base", policy, lora=None, trust_remote_code=False)
        dist.barrier()
        records = evaluate(run.config, policy, policy, Prompts(directory / "dataset", "eval"), run.world)
        found.append([record["reward"] for record in records])
    rows = (directory / "validated" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows], found


def restored_and_validated(rank: int, directory: Path) -> tuple[Any, Any]:
    return save_and_restore(rank, directory), validated(rank, directory)


@pytest.fixture(scope="module")
def others(inputs: Path) -> list[tuple[Any, Any]]:
    return run_ranks(restored_and_validated, 2, inputs)


def test_skipped_steps_and_the_scale_come_back_on_all_ranks(others: list[tuple[Any, Any]]) -> None:
    expected = {
        "actor": {"skipped": 2, "scale": 1024.0, "scaled_steps": 7},
        "critic": {"skipped": 1, "scale": 2048.0, "scaled_steps": 9},
    }
    assert [states for states, _ in others] == [expected] * 2


def test_validation_finds_what_an_evaluation_of_the_same_weights_does(others: list[tuple[Any, Any]]) -> None:
    for _, (rows, found) in others:
        for row, rewards in zip(rows, found, strict=True):
            right = [reward >= VALIDATED["evaluation.success_reward"] for reward in rewards]
            assert row["val/reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
            assert row["val/accuracy"] == pytest.approx(sum(right) / len(right))
            assert 0 < row["val/accuracy"] < 1, "the threshold tells responses apart"
        assert rows[0]["val/reward/mean"] != rows[1]["val/reward/mean"], "the weights have changed enough to be told apart"
