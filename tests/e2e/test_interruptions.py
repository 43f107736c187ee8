"""One run is killed again and again – flow, agent, rank; in the rollout, the update, a save – and ends bit-identical.

The pipeline is the real one (`ppoflow run`, Prefect, torchrun, two ranks), the model tiny. Where a kill lands is read from
the run's own files; each is sent as soon as they show that the phase has begun.
"""

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from rl_core.artifacts import open_artifact
from rl_core.checkpoint.dcp import load_tensors, stored_tensors
from tests.pipeline import PPOFLOW, ROOT, environment, ppoflow, tiny_settings

STEPS = 9
SECONDS = 900


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("interrupted")
    settings = tiny_settings(directory)
    settings["launch"] |= {"nproc_per_node": 2, "max_restarts": 0}  # the flow is to see what died
    settings["rollout"]["max_new_tokens"] = 100  # a rollout and an update that last long enough to be hit
    settings["trainer"] |= {"max_steps": STEPS, "ppo_mini_batch_size": 4}
    settings["checkpoint"] = {"save_steps": 2, "keep": 20}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


class Running:
    """A `ppoflow run` in the background."""

    def __init__(self, config: Path, home: Path) -> None:
        self.home = home
        self.log = home.with_suffix(".log")
        with self.log.open("ab") as output:
            command = [*PPOFLOW, "run", str(config)]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment(home), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def run_dir(self) -> Path | None:
        return next((self.home / "runs").glob("[!.]*/"), None)

    def wait_until(self, condition: Callable[[Path], bool]) -> None:
        """Return as soon as the run directory shows it."""
        waited = threading.Event()
        for _ in range(SECONDS * 1000):
            assert self.process.poll() is None, f"it ended too early:\n{self.log.read_text()[-4000:]}"
            if (run_dir := self.run_dir) is not None and condition(run_dir):
                return
            waited.wait(0.001)  # a polling interval; nothing depends on its length
        pytest.fail(f"never seen:\n{self.log.read_text()[-4000:]}")

    def agent(self) -> psutil.Process:
        return next(child for child in psutil.Process(self.process.pid).children() if "tasks.agent" in child.cmdline())

    def ranks(self) -> list[psutil.Process]:
        return [child for child in self.agent().children() if "rl_core.train" in child.cmdline()]


@contextmanager
def interrupted(config: Path, home: Path) -> Iterator[Running]:
    """A run that the block interrupts; afterwards it has ended and nothing of it is left."""
    run = Running(config, home)
    yield run
    run.process.wait(timeout=SECONDS)
    left = [process for process in psutil.process_iter() if str(home) in _environment_of(process)]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


def _environment_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("PPOFLOW_HOME", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def logged(text: str) -> Callable[[Path], bool]:
    return lambda run: (run / "train.log").exists() and text in (run / "train.log").read_text()


def committed(step: int) -> Callable[[Path], bool]:
    return lambda run: (run / "checkpoints" / f"step_{step:06d}").exists()


def saving(step: int) -> Callable[[Path], bool]:
    return lambda run: (run / "checkpoints" / f".step_{step:06d}.partial" / "tensors").exists()


def final_tensors(home: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    checkpoint = open_artifact(next((home / "runs").glob(f"[!.]*/checkpoints/step_{step:06d}")))
    directory = checkpoint.path / "tensors"
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored_tensors(directory).items()}
    load_tensors(tensors, directory)
    return tensors


def run_to_the_end(config: Path, home: Path) -> dict:
    report = home.with_suffix(".json")
    done = ppoflow("run", config, "--json", report, home=home, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text())


def test_a_run_killed_in_every_phase_ends_bit_identical(config, tmp_path):
    whole, home = tmp_path / "whole", tmp_path / "killed"
    run_to_the_end(config, whole)

    with interrupted(config, home) as run:  # the flow's process, in the rollout of step 2
        run.wait_until(committed(2))
        run.process.kill()
    with interrupted(config, home) as run:  # torchrun's agent, in the update of step 3
        run.wait_until(logged("Step 3 | Reward computed"))
        run.agent().kill()
    assert run.process.returncode == 1
    with interrupted(config, home) as run:  # a rank, inside the save after step 6
        run.wait_until(saving(6))
        run.ranks()[-1].kill()
    assert run.process.returncode == 1
    assert "ppoflow: to continue: PPOFLOW_HOME=" in run.log.read_text()
    with interrupted(config, home) as run:  # Ctrl-C: the running step is finished and saved
        run.wait_until(logged("Step 6 | Rollout completed"))
        run.process.send_signal(signal.SIGINT)
    assert run.process.returncode != 0
    at_the_kill = max(int(path.name[5:]) for path in run.run_dir.glob("checkpoints/step_*"))
    assert at_the_kill >= 7

    report = run_to_the_end(config, home)
    states = {stage["name"]: stage for stage in report["stages"]}
    assert states["tokenize_dataset"]["state"] == states["convert_checkpoint"]["state"] == "reused"
    assert states["train_policy"]["state"] == "resumed"
    assert states["train_policy"]["resumed_from_step"] == at_the_kill

    expected, actual, before = final_tensors(whole), final_tensors(home), final_tensors(home, at_the_kill)
    assert expected.keys() == actual.keys()
    assert {name.split(".")[0] for name in actual} == {"actor", "critic", "actor_optimizer", "critic_optimizer"}
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    assert any(not torch.equal(before[name], tensor) for name, tensor in actual.items())
    steps = [json.loads(line)["step"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))
