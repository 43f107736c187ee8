"""A whole pipeline – `ppoflow run`, Prefect, MLflow, torchrun – is killed in each stage, before the stage's result has its name,
and goes on by the same command; then two flows on the same keys end with the same policy."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rl_core.artifacts import open_artifact
from tests.faults.flow_cases import STAGES
from tests.faults.flow_strike import SECONDS, left_of, start
from tests.faults.hook import Fault
from tests.pipeline import tiny_settings

STORED = STAGES[:-1]
"""Those whose result is in the store."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose training needs no worker for rewards."""
    directory = tmp_path_factory.mktemp("stages")
    settings = tiny_settings(directory)
    settings["trainer"]["max_steps"] = 1
    settings["reward"]["timeout_s"] = None
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    return directory


def test_a_pipeline_killed_in_every_stage_goes_on(pipeline: Path) -> None:
    home, config = pipeline / "home", pipeline / "config.yaml"
    for number, stage in enumerate(STORED):
        fired = pipeline / f"fired-{stage}"
        fault = Fault(f"store: {stage}", None, None, "self", "KILL", str(fired))
        killed = start(config, home, pipeline / f"killed-{stage}.json", fault)
        assert killed.wait(SECONDS) == -9, (pipeline / f"killed-{stage}.log").read_text()[-3000:]
        assert fired.exists()
        _, alive = psutil.wait_procs(left_of(home), timeout=20)
        assert not alive, "orphans"
        assert not list((home / "store" / stage).glob("[!.]*")), f"{stage} has no result yet"
        for earlier in STORED[:number]:
            [artifact] = (home / "store" / earlier).glob("[!.]*")
            open_artifact(artifact, remembered=False)

    both = [start(config, home, pipeline / f"{name}.json") for name in ("one", "two")]
    for flow, name in zip(both, ("one", "two"), strict=True):
        assert flow.wait(SECONDS) == 0, (pipeline / f"{name}.log").read_text()[-3000:]
    reports: list[dict[str, Any]] = [json.loads((pipeline / f"{name}.json").read_text()) for name in ("one", "two")]
    policies = {stage["key"] for report in reports for stage in report["stages"] if stage["name"] == "train_policy"}
    assert len(policies) == 1
    states = [{stage["name"]: stage["state"] for stage in report["stages"]} for report in reports]
    assert all(state[stage] == "reused" for state in states for stage in STORED[:2]), states
    for stage in STORED:
        [artifact] = (home / "store" / stage).glob("[!.]*")
        open_artifact(artifact, remembered=False)
        assert not list((home / "store" / stage).glob(".*.broken-*"))
