"""A whole pipeline – `ppoflow run`, Prefect, MLflow, torchrun – is killed in each stage, before the stage's result has its name,
and goes on by the same command; then two flows on the same keys end with the same policy."""

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rl_core.artifacts import open_artifact
from tests.faults.hook import Fault, to_environment
from tests.pipeline import PPOFLOW, ROOT, environment, tiny_settings

STAGES = ("tokenize_dataset", "convert_checkpoint", "train_policy", "evaluate_policy")
SITE = Path(__file__).parent / "sitecustomize"
SECONDS = 600


def start(config: Path, home: Path, report: Path, fault: Fault | None = None) -> "subprocess.Popen[bytes]":
    more = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300"}  # a machine that is busy with other tests
    if fault is not None:
        more |= {"PYTHONPATH": f"{SITE}:{ROOT}", **to_environment(fault)}
    with report.with_suffix(".log").open("ab") as log:
        command = [*PPOFLOW, "run", str(config), "--json", str(report)]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(home, **more), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def left_of(home: Path) -> list[psutil.Process]:
    """Processes that still belong to the pipeline over `home`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PPOFLOW_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


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
    for number, stage in enumerate(STAGES):
        fired = pipeline / f"fired-{stage}"
        fault = Fault(f"store: {stage}", None, None, "self", "KILL", str(fired))
        killed = start(config, home, pipeline / f"killed-{stage}.json", fault)
        assert killed.wait(SECONDS) == -9, (pipeline / f"killed-{stage}.log").read_text()[-3000:]
        assert fired.exists()
        _, alive = psutil.wait_procs(left_of(home), timeout=20)
        assert not alive, "orphans"
        assert not list((home / "store" / stage).glob("[!.]*")), f"{stage} has no result yet"
        for earlier in STAGES[:number]:
            [artifact] = (home / "store" / earlier).glob("[!.]*")
            open_artifact(artifact, remembered=False)

    both = [start(config, home, pipeline / f"{name}.json") for name in ("one", "two")]
    for flow, name in zip(both, ("one", "two"), strict=True):
        assert flow.wait(SECONDS) == 0, (pipeline / f"{name}.log").read_text()[-3000:]
    reports: list[dict[str, Any]] = [json.loads((pipeline / f"{name}.json").read_text()) for name in ("one", "two")]
    policies = {stage["key"] for report in reports for stage in report["stages"] if stage["name"] == "train_policy"}
    assert len(policies) == 1
    states = [{stage["name"]: stage["state"] for stage in report["stages"]} for report in reports]
    assert all(state[stage] == "reused" for state in states for stage in STAGES[:2]), states
    for stage in STAGES:
        [artifact] = (home / "store" / stage).glob("[!.]*")
        open_artifact(artifact, remembered=False)
        assert not list((home / "store" / stage).glob(".*.broken-*"))
