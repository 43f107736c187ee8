"""Prefect's and MLflow's servers are killed while a training runs: it goes on, and is whole whether they come back or not."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.pipeline import PPOFLOW, ROOT, environment, tiny_settings
from tests.servers import Servers

STEPS = 6
SECONDS = 600
REWARD = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def compute_score(data_source, solution_str, ground_truth, extra_info):
    '''Number of digits; in the steps 2 and 4 only when the test lets it go on.'''
    logs = list((HERE / "home" / "runs").glob("*/metrics.jsonl"))
    step = len(logs[0].read_text().splitlines()) if logs else 0
    if step in (2, 4):
        (HERE / f"reached_{step}").touch()
        while not (HERE / f"go_{step}").exists():
            time.sleep(0.01)
    return sum(character.isdigit() for character in solution_str)
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    both = Servers(tmp_path / "home")
    try:
        both.start()
        yield both
    finally:
        both.stop()


class Flow:
    """`ppoflow run` against the servers, whose reward waits in step 2 and in step 4."""

    def __init__(self, directory: Path, shell: dict[str, str]) -> None:
        self.directory, self.log, self.report = directory, directory / "log", directory / "report.json"
        settings = tiny_settings(directory)
        (directory / "reward.py").write_text(REWARD)
        settings["trainer"]["max_steps"] = STEPS
        settings["reward"]["timeout_s"] = None
        (directory / "config.yaml").write_text(yaml.safe_dump(settings))
        self.process = self.start(shell)

    def start(self, shell: dict[str, str]) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            command = [*PPOFLOW, "run", str(self.directory / "config.yaml"), "--json", str(self.report)]
            return subprocess.Popen(command, cwd=ROOT, env=shell, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until_in(self, step: int) -> None:
        deadline = time.monotonic() + SECONDS
        while not (self.directory / f"reached_{step}").exists():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def let_go_on_in(self, step: int) -> None:
        (self.directory / f"go_{step}").touch()

    def stages(self) -> dict[str, str]:
        return {stage["name"]: stage["state"] for stage in json.loads(self.report.read_text())["stages"]}


def steps_in_mlflow(shell: dict[str, str]) -> list[int]:
    import mlflow

    client = mlflow.MlflowClient(shell["MLFLOW_TRACKING_URI"])
    [training] = client.search_runs(
        [experiment.experiment_id for experiment in client.search_experiments()], "tags.`ppoflow.run_key` != ''"
    )
    return sorted(metric.step for metric in client.get_metric_history(training.info.run_id, "critic/score/mean"))


def test_servers_that_go_away_and_come_back(servers: Servers, tmp_path: Path) -> None:
    flow = Flow(tmp_path, servers.environment)
    flow.wait_until_in(2)
    servers.kill()
    flow.let_go_on_in(2)
    flow.wait_until_in(4)  # two steps without them
    servers.start()
    flow.let_go_on_in(4)
    assert flow.process.wait(SECONDS) == 0, flow.log.read_text()[-3000:]
    assert set(flow.stages().values()) <= {"computed", "registered"}, flow.stages()
    assert steps_in_mlflow(servers.environment) == list(range(STEPS))
    [run] = httpx.post(f"{servers.environment['PREFECT_API_URL']}/flow_runs/filter", json={}).json()
    assert run["state_type"] == "COMPLETED"


def test_servers_that_do_not_come_back_cost_no_training(servers: Servers, tmp_path: Path) -> None:
    flow = Flow(tmp_path, servers.environment | {"PREFECT_CLIENT_MAX_RETRIES": "1"})  # else it waits for a minute
    flow.wait_until_in(2)
    servers.kill()
    flow.let_go_on_in(2)
    flow.let_go_on_in(4)
    assert flow.process.wait(SECONDS) == 1
    said = flow.log.read_text()
    url = servers.environment["PREFECT_API_URL"]
    assert f"ppoflow: error: Prefect's server at {url} does not answer" in said, said[-3000:]
    assert "ppoflow: to continue: " in said
    assert "Traceback" not in said
    again: dict[str, Any] = environment(tmp_path / "home")
    assert flow.start(again).wait(SECONDS) == 0, flow.log.read_text()[-3000:]
    assert flow.stages()["train_policy"] == "reused"
