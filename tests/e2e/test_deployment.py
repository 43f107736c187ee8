"""The deployment as README tells it: servers, work pool, `prefect deploy`, a worker, a schedule, a kill and a retry."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import yaml

from tests.pipeline import ROOT, tiny_config, tiny_settings
from tests.servers import Servers, stopped_at_the_end

T = TypeVar("T")
PREFECT = str(Path(sys.executable).with_name("prefect"))
DEPLOYMENT = "post-training/smollm2-arithmetic"
CHECKPOINTS = "runs/*/checkpoints/step_*/manifest.json"


class Prefect:
    """The servers' environment, their command line and what the API says about flow runs."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self.environment = environment

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """`prefect …` in the background."""
        return subprocess.Popen(
            [PREFECT, *arguments], cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, start_new_session=True, text=True
        )

    def run(self, *arguments: str) -> None:
        """`prefect …` to its end."""
        subprocess.run([PREFECT, *arguments], cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, timeout=90, check=True)

    def flow_run(self, scheduled: bool, number: int = 0) -> dict[str, Any] | None:
        """Of the runs that the schedule, or a person, has started, the first (0), second, …; None where there is none yet."""
        runs = httpx.post(f"{self.environment['PREFECT_API_URL']}/flow_runs/filter", json={"sort": "START_TIME_ASC"}).json()
        started = [run for run in runs if run["auto_scheduled"] == scheduled and run["start_time"]]
        return started[number] if number < len(started) else None

    def ended(self, scheduled: bool, number: int = 0, run_count: int = 1) -> dict[str, Any] | None:
        """`flow_run`, once its attempt number `run_count` has ended."""
        run = self.flow_run(scheduled, number)
        final = run is not None and run["state_type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
        return run if run and final and run["run_count"] == run_count else None


def wait_for(question: Callable[[], T | None], seconds: float) -> T:
    """The first answer that is not None."""
    deadline = time.monotonic() + seconds
    while (answer := question()) is None:
        assert time.monotonic() < deadline, f"no answer within {seconds} s"
        time.sleep(0.1)
    return answer


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Prefect]:
    """`make servers`, and a shell with the lines that it prints."""
    both = Servers(tmp_path / "home")
    try:
        both.start()
        yield Prefect(both.home, both.environment)
    finally:
        both.stop()


def deploy(servers: Prefect, directory: Path) -> None:
    """infra/prefect.yaml with a tiny configuration, given as a whole, and a schedule that fires within a minute."""
    project = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text(encoding="utf-8"))
    (deployment,) = project["deployments"]
    assert f"post-training/{deployment['name']}" == DEPLOYMENT
    assert deployment["schedules"][0]["cron"]
    anchor = (datetime.now(UTC) + timedelta(seconds=15)).isoformat()
    deployment["schedules"] = [{"interval": 60, "anchor_date": anchor, "timezone": "UTC", "active": True}]
    deployment["parameters"] = {"config": tiny_settings(directory)}
    path = directory / "prefect.yaml"
    path.write_text(yaml.safe_dump(project), encoding="utf-8")
    servers.run("--no-prompt", "deploy", "--prefect-file", str(path), "--all")


def processes_of(home: Path, program: str) -> list[psutil.Process]:
    """Living processes that run `program` over `home`."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = program in " ".join(process.cmdline()) and process.environ().get("PPOFLOW_HOME") == str(home)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_schedule_kill_retry_and_cancel(servers: Prefect, tmp_path: Path) -> None:
    servers.run("work-pool", "create", "local", "--type", "process")
    deploy(servers, tmp_path)
    config = str(tiny_config(tmp_path))

    def start(seed: int) -> "tuple[subprocess.Popen[str], Path]":
        """A run by hand with 40 steps, and the manifest of its first checkpoint."""
        finished = set(servers.home.glob(CHECKPOINTS))
        parameters = {"config": config, "overrides": {"trainer.seed": seed, "trainer.max_steps": 40}}
        watching = servers.start("deployment", "run", DEPLOYMENT, "--params", json.dumps(parameters), "--watch")
        return watching, wait_for(lambda: next(iter(set(servers.home.glob(CHECKPOINTS)) - finished), None), 300)

    def nothing_trains() -> bool | None:
        return None if processes_of(servers.home, "rl_core.train") else True

    with stopped_at_the_end(servers.start("worker", "start", "--pool", "local")) as worker:
        wait_for(lambda: servers.flow_run(scheduled=True), 240)
        servers.run("--no-prompt", "deployment", "schedule", "clear", "--accept-yes", DEPLOYMENT)
        scheduled = wait_for(lambda: servers.ended(scheduled=True), 400)
        assert scheduled["state_type"] == "COMPLETED", scheduled["state"]["message"]

        watching, checkpoint = start(seed=1)
        children = psutil.Process(worker.pid).children()
        assert len(children) == 1, children
        children[0].kill()
        killed = wait_for(lambda: servers.ended(scheduled=False), 120)
        assert killed["state_type"] == "CRASHED"
        assert watching.wait(120) == 1
        wait_for(nothing_trains, 10)

        servers.run("flow-run", "retry", killed["id"])
        again = wait_for(lambda: servers.ended(scheduled=False, run_count=2), 400)
        assert again["state_type"] == "COMPLETED", again["state"]["message"]
        log = (checkpoint.parents[2] / "train.log").read_text(encoding="utf-8")
        assert "Going on from step_" in log
        assert "of 40 steps are done" in log

        watching, checkpoint = start(seed=2)
        running = servers.flow_run(scheduled=False, number=1)
        assert running is not None
        servers.run("flow-run", "cancel", running["id"])
        cancelled = wait_for(lambda: servers.ended(scheduled=False, number=1), 120)
        assert cancelled["state_type"] == "CANCELLED"
        wait_for(nothing_trains, 10)
        assert watching.wait(120) == 1
        assert checkpoint.exists() or list(checkpoint.parents[1].glob("step_*/manifest.json"))
