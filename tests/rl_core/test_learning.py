"""A tiny model learns a toy reward through the real loop by every estimator; it does not at learning rate 0 or from shuffled
advantages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_core import ppo, train
from rl_core.artifacts import Artifact, commit, fresh_scratch
from rl_core.config import Config, parse_config
from rl_core.config.algorithm import ESTIMATORS
from rl_core.data.tokenize import tokenize
from rl_core.distributed import joined
from rl_core.models.source import load_tokenizer_dir
from tests.tiny import tiny_model, tiny_prompts

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c in "abcdefghijklmnopqrstuvwxyz" for c in solution_str) / 8
"""
STEPS, LEVEL = 25, 0.8
"""An untrained model draws letters about a quarter of the time (26 of 101 tokens)."""


def config_for(directory: Path, **overrides: object) -> Config:
    (directory / "reward.py").write_text(REWARD)
    values = {
        "model": {"name_or_path": str(directory / "model")},
        "data": {"source": {"kind": "files", "path": str(directory / "prompts.jsonl")}, "eval_fraction": 0.2},
        "reward": {"kind": "function", "path": str(directory / "reward.py")},
        "registry": {"name": "tiny"},
        "rollout": {"max_new_tokens": 8},
        "trainer": {
            "max_steps": STEPS, "train_batch_size": 64, "ppo_mini_batch_size": 32, "per_device_train_batch_size": 32,
        },
        "actor": {"learning_rate": 3e-3},
        "critic": {"learning_rate": 3e-3},
        "checkpoint": {"save_steps": 1000},
        "launch": {"device": "cpu"},
    }  # fmt: skip
    return parse_config(values, overrides)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Artifact, Artifact]:
    directory = tmp_path_factory.mktemp("learning")
    patch = pytest.MonkeyPatch()
    patch.setenv("PPOFLOW_HOME", str(directory / "home"))
    model = tiny_model(directory / "model", hidden_size=32)
    tiny_prompts(directory / "prompts.jsonl", 90)
    scratch = fresh_scratch(directory / "dataset")
    stats = tokenize(config_for(directory).data, load_tokenizer_dir(model), scratch)
    dataset = commit(scratch, directory / "dataset", kind="dataset", key="d", results=stats)
    yield directory, dataset, Artifact(model, {"digest": "tiny"})
    patch.undo()


def rewards(inputs: tuple[Path, Artifact, Artifact], output: Path, **overrides: object) -> list[float]:
    directory, dataset, base = inputs
    config = config_for(directory, **{key.replace("__", "."): value for key, value in overrides.items()})
    output.mkdir()
    with joined(config.launch) as world:
        ppo.train(train.build(config.settled(world.size), dataset, base, output, world, stopping=lambda: False))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    return [row["critic/score/mean"] for row in rows]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_learns(inputs, tmp_path, estimator):
    curve = rewards(inputs, tmp_path / "run", **with_estimator(estimator))
    assert curve[0] < 0.4
    assert sum(curve[-3:]) / 3 > LEVEL


def with_estimator(estimator: str) -> dict[str, object]:
    """64 responses a step, as for the others."""
    groups = {"rollout__n": 4, "trainer__train_batch_size": 16} if ESTIMATORS[estimator].group else {}
    rate = {"actor__learning_rate": 8e-3} if estimator == "remax" else {}  # one greedy response is a noisy baseline
    return {"algorithm__adv_estimator": estimator, **groups, **rate}


def test_nothing_is_learned_at_learning_rate_zero(inputs, tmp_path):
    curve = rewards(inputs, tmp_path / "run", actor__learning_rate=0.0, critic__learning_rate=0.0)
    assert max(curve) < 0.4


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_is_learned_from_shuffled_advantages(inputs, tmp_path, monkeypatch, estimator):
    real = ppo.make_experience

    def shuffled(batch, *args):
        experience, generator = real(batch, *args), torch.Generator().manual_seed(0)
        mask = batch.mask
        values = experience.advantages[mask]
        advantages = experience.advantages.clone()
        advantages[mask] = values[torch.randperm(len(values), generator=generator)]
        return replace(experience, advantages=advantages)

    monkeypatch.setattr(ppo, "make_experience", shuffled)
    curve = rewards(inputs, tmp_path / "run", **with_estimator(estimator))
    assert max(curve) < 0.6
