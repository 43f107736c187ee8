"""Runs a whole `ppoflow run` – Prefect, MLflow, torchrun – that is struck, starts it again, and says what is wrong afterwards."""

import json
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.faults.flow_cases import STAGES, STEPS, FlowCase
from tests.faults.hook import Fault, to_environment
from tests.pipeline import PPOFLOW, ROOT, environment, tiny_settings
from tests.tiny import tiny_model

SITE = Path(__file__).parent / "sitecustomize"
SECONDS = 600
ENDINGS = {"KILL": (-9,), "TERM": (75, 0), "STOP": (0,), "clock": (0,)}
OF_OTHERS = (0, 1, 75)
"""A rank or torchrun's agent was ended: the flow restarts it, or ends for the next start to go on."""


@dataclass
class FlowOutcome:
    """What came of a case; it is well where `wrong` is empty."""

    case: FlowCase
    fired: bool
    code: int | None
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class FlowWorld:
    """A directory with a configuration and the home of a flow that nothing struck."""

    directory: Path

    @property
    def whole(self) -> Path:
        """The home."""
        return self.directory / "whole"

    def writes(self) -> Counter[str]:
        """How often that flow met each point of a write, in the process that met it most."""
        most = Counter[str]()
        for line, times in Counter((self.directory / "writes").read_text().splitlines()).items():
            point = line.partition(" ")[2]
            most[point] = max(most[point], times)
        return most


def start(config: Path, home: Path, report: Path, fault: Fault | None = None) -> "subprocess.Popen[bytes]":
    """`ppoflow run`; what it prints is appended to the report's path with `.log`."""
    more = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300"}  # a machine that is busy with other tests
    if fault is not None:
        more |= {"PYTHONPATH": f"{SITE}:{ROOT}", **to_environment(fault)}
    command = [*PPOFLOW, "run", str(config), "--json", str(report)]
    with report.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(home, **more), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def make_flow_world(directory: Path) -> FlowWorld:
    """Make one, if it is not there yet."""
    world = FlowWorld(directory)
    if (directory / "ready").exists():
        return world
    shutil.rmtree(directory, ignore_errors=True)
    settings = tiny_settings(directory)
    tiny_model(directory / "model", num_hidden_layers=1)
    settings["trainer"]["max_steps"] = STEPS
    settings["reward"]["timeout_s"] = None  # in the rank's own process: another one would be an import of seconds
    settings["evaluation"]["temperature"] = 1.0
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    world.whole.mkdir()
    tell = Fault("", None, None, "self", "tell", str(directory / "writes"))
    code = start(directory / "config.yaml", world.whole, directory / "whole.json", tell).wait(SECONDS)
    assert code == 0, (directory / "whole.log").read_text()[-3000:]
    (directory / "ready").touch()
    return world


def strike_flow(world: FlowWorld, case: FlowCase, directory: Path) -> FlowOutcome:
    """Run the case in `directory`, which is made anew. What earlier stages made is there already."""
    shutil.rmtree(directory, ignore_errors=True)
    home, report, log, fired = (directory / name for name in ("home", "report.json", "report.log", "fired"))
    (home / "store").mkdir(parents=True)
    for earlier in _made_before(case.stage):
        for artifact in (world.whole / "store" / earlier).glob("[!.]*"):
            shutil.copytree(artifact, home / "store" / earlier / artifact.name)
    config, began = world.directory / "config.yaml", time.perf_counter()
    fault = Fault(case.point, case.step, case.rank, case.victim, case.how, str(fired))
    code = _end_of(start(config, home, report, fault))
    outcome = FlowOutcome(case, fired.exists(), code)
    say = outcome.wrong.append
    to_flow = case.victim == "flow" or (case.rank is None and case.victim == "self")
    allowed = ENDINGS[case.how] if to_flow or case.how in ("STOP", "clock") else OF_OTHERS
    if not outcome.fired:
        allowed = (0,)
    if code is None:
        say("hang: the flow did not end")
    elif code not in allowed:
        say(f"exit code: {code}, not {allowed}: {' | '.join(log.read_text().splitlines()[-3:])}")
    _, alive = psutil.wait_procs(left_of(home), timeout=30)
    for process in alive:
        say(f"orphan: {process.pid}")
        process.kill()
    for problem in _not_whole(home):
        say(f"corrupt: {problem}")
    again = _end_of(start(config, home, report))
    if again != 0:
        say(f"resume: started again it ended with {again}: {' | '.join(log.read_text().splitlines()[-3:])}")
    else:
        outcome.wrong += [f"corrupt: {problem}" for problem in _not_whole(home)]
        outcome.wrong += [f"different: {problem}" for problem in _differences(home, report, world)]
        for leaving in [*(home / "store").glob("*/.*.partial"), *(home / "store").glob("*/.*.broken-*")]:
            say(f"leaving: {leaving.name}")
    outcome.seconds = time.perf_counter() - began
    return outcome


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


def _made_before(stage: str) -> list[str]:
    earlier = list(STAGES[: STAGES.index(stage)])
    return [*earlier, "evaluate_model"] if stage == "register_policy" else earlier


def _end_of(process: "subprocess.Popen[bytes]") -> int | None:
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _not_whole(home: Path) -> list[str]:
    from rl_core.artifacts import damage

    artifacts = [path for path in (home / "store").glob("[!.]*/[!.]*") if path.is_dir()]
    return [f"{path.parent.name}: {problem}" for path in artifacts for problem in damage(path)]


def _differences(home: Path, report: Path, world: FlowWorld) -> list[str]:
    """In what a home differs from that of the flow that nothing struck: keys and digests of results, what is registered."""
    here, there = _results(home, report), _results(world.whole, world.directory / "whole.json")
    found = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    return [f"{name}: {here.get(name)} instead of {there.get(name)}" for name in found] + _twice(home)


def _results(home: Path, report: Path) -> dict[str, Any]:
    stages = json.loads(report.read_text())["stages"]
    results: dict[str, Any] = {f"key of {stage['name']}": stage["key"] for stage in stages}
    for path in (home / "store").glob("[!.]*/[!.]*"):
        results[f"{path.parent.name}/{path.name}"] = json.loads((path / "manifest.json").read_text())["digest"]
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as database:
        results["versions"] = database.execute("SELECT name, version, status FROM model_versions").fetchall()
        results["aliases"] = sorted(database.execute("SELECT name, alias, version FROM registered_model_aliases").fetchall())
    return results


def _twice(home: Path) -> list[str]:
    query = "SELECT key, step FROM metrics GROUP BY run_uuid, key, step HAVING count(*) > 1"
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as database:
        return [f"metric {key} of step {step} is there twice" for key, step in database.execute(query)]
