"""The bounded part of the bench: a few cases, the mutants that it must see, and what misbehaves. `make faults`: more."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNT, SEED = 10, int(os.environ.get("FAULTS_SEED", "11"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process for all, since it spends seconds on imports; it must have no threads."""
    output = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "-m", "tests.faults.bench", "--count", str(COUNT), "--seed", str(SEED), "--output", str(output)]
    done = subprocess.run(
        [*command, "--mutants", "--behaviours"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (output / "report.json").exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return {"said": done.stdout[-6000:], "output": output, **json.loads((output / "report.json").read_text())}


def test_a_training_that_is_struck_anywhere_ends_bit_identical(report: dict[str, Any]) -> None:
    assert report["wrong cases"] == [], report["said"]
    assert report["cases"] == COUNT
    assert report["struck"] == COUNT, "every point was met"
    assert report["resumed"] >= COUNT / 2


@pytest.mark.parametrize(
    ("mutant", "symptoms"),
    [
        ("no rename", {"corrupt"}),
        ("manifest first", {"corrupt"}),
        ("step not restored", {"different"}),
        ("cursor not saved", {"different"}),
    ],
)
def test_the_bench_sees_a_planted_fault(report: dict[str, Any], mutant: str, symptoms: set[str]) -> None:
    seen = report["mutants"][mutant]
    assert seen != "not seen"
    assert {problem.split(":")[0] for problem in seen} & symptoms, seen


def test_what_misbehaves_has_the_outcome_that_the_configuration_states(report: dict[str, Any]) -> None:
    assert set(map(str, report["behaviours"].values())) == {"as it must be"}, report["behaviours"]


def test_moments_of_every_trained_parameter_are_stored_and_are_not_empty(report: dict[str, Any]) -> None:
    import torch

    from rl_core.checkpoint.dcp import load_tensors, stored_tensors

    directory = report["output"] / "world" / "whole" / "checkpoints" / "step_000003" / "tensors"
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored_tensors(directory).items()}
    load_tensors(tensors, directory)
    for role in ("actor", "critic"):
        trained = [name.removeprefix(f"{role}.") for name in tensors if name.startswith(f"{role}.")]
        assert len(trained) > 8
        for name in trained:
            for moment in ("exp_avg", "exp_avg_sq"):
                assert tensors[f"{role}_optimizer.{name}.{moment}"].any(), f"{moment} of the {role}'s {name}"
            assert tensors[f"{role}_optimizer.{name}.step"] == 6, "two optimizer steps in each of three"
