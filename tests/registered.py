"""Policies and evaluations in a store, and one MLflow database (sqlite) for all tests: making one takes seconds."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_core.digests import digest_json
from tasks.environment import prepare
from tasks.store import Key, Reference, produce
from tests.tiny import tiny_model

DATASET = Reference("tokenize_dataset", "d" * 64, "1" * 64)
BASE = Reference("convert_checkpoint", "b" * 64, "2" * 64)


@contextmanager
def shared_home(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point ppoflow and MLflow to the home that the tests of the registry share; each uses names of its own."""
    before = dict(os.environ)
    home = factory.getbasetemp() / "registry-home"
    (home / "mlflow").mkdir(parents=True, exist_ok=True)
    for name in before:
        if name.startswith("MLFLOW_"):
            del os.environ[name]
    os.environ["PPOFLOW_HOME"] = str(home)
    prepare()
    yield home
    os.environ.clear()
    os.environ.update(before)


def tiny_policy(name: str, seed: int = 0) -> Reference:
    """A trained policy in the store, as `train_policy` leaves it; equal arguments, equal policy."""

    def make(scratch: Path) -> dict[str, Any]:
        tiny_model(scratch, seed=seed)
        metrics = [
            {"step": step, "critic/score/mean": 0.1 * step, "response_length/mean": 9.0 - step, "actor/reference_kl": 0.01 * step}
            for step in range(1, 5)
        ]
        (scratch / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
        (scratch / "config.yaml").write_text(f"name: {name}\n", encoding="utf-8")
        return {"step": 4, "run_key": digest_json(["run", name, seed])}

    return produce(Key("train_policy", digest_json([name, seed]), {"seed": seed}), make)


def tiny_evaluation(policy: Reference, reward: float, base: float = 0.2, champion: tuple[str, float] | None = None) -> Reference:
    """A comparison with these mean rewards (accuracies are half of them), as `evaluate_policy` leaves it.

    Args:
        champion: digest and mean reward of the champion that it was compared with.
    """

    def result(mean: float) -> dict[str, Any]:
        return {"reward": {"mean": mean}, "accuracy": {"mean": mean / 2}}

    def make(scratch: Path) -> dict[str, Any]:
        report = {
            "base": result(base),
            "champion": result(champion[1]) if champion else None,
            "policy": result(reward),
            "digests": {"base": BASE.digest, "champion": champion[0] if champion else None, "policy": policy.digest},
        }
        (scratch / "report.json").write_text(json.dumps(report), encoding="utf-8")
        for name in ("report.md", "samples.md", "learning_curve.png", "rewards.png"):
            (scratch / name).write_text(name, encoding="utf-8")
        (scratch / "samples").mkdir()
        for name in (name for name in ("base", "champion", "policy") if report[name]):
            row = {"prompt_id": "p", "prompt": "1+1=", "response": name, "reward": 0.5, "ground_truth": "two"}
            (scratch / "samples" / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        return {"policy": {"reward": reward, "accuracy": reward / 2}}

    return produce(Key("evaluate_policy", digest_json([policy.digest, reward, base, champion]), {}), make)


def forget_downloads(home: Path) -> None:
    """As on a machine that has not seen the registered models yet."""
    shutil.rmtree(home / "downloads", ignore_errors=True)
