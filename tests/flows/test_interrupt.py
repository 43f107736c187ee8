"""A run that is stopped in training, as a terminal and as the kernel do it: what it says, and what is left of it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl_core.errors import EXIT_INTERRUPTED
from tests.flows.conftest import Finished
from tests.pipeline import PPOFLOW, ROOT, environment, ppoflow

CHECKPOINTS = "runs/*/checkpoints/step_*/manifest.json"


def processes_of(home: Path) -> Iterator[psutil.Process]:
    """Living processes that work over `home`, this one's aside."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("PPOFLOW_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


@pytest.mark.parametrize(
    ("number", "seed", "code", "said"),
    [
        (signal.SIGINT, 11, 130, "stopped by Ctrl-C"),
        (signal.SIGTERM, 12, EXIT_INTERRUPTED, "stopped by SIGTERM"),
        (signal.SIGKILL, 13, -9, None),
    ],
)
def test_nothing_is_left_of_a_stopped_run(copied: Finished, number: int, seed: int, code: int, said: str | None) -> None:
    before = set(copied.home.glob(CHECKPOINTS))
    settings = ("--set", f"trainer.seed={seed}", "--set", "trainer.max_steps=1000")
    process = subprocess.Popen(
        [*PPOFLOW, "run", str(copied.config), *settings], cwd=ROOT, env=environment(copied.home), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while not set(copied.home.glob(CHECKPOINTS)) - before:
            assert process.poll() is None
            time.sleep(0.1)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal sends it to the whole group
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, errors
    if said is not None:
        assert said in next(line for line in errors.splitlines() if line.startswith("ppoflow: error: "))
        assert "Traceback" not in errors
        assert "ppoflow: to continue: PPOFLOW_HOME=" in errors.splitlines()[-1]
    deadline = time.monotonic() + 10
    while left := list(processes_of(copied.home)):
        assert time.monotonic() < deadline, [one.cmdline() for one in left]
        time.sleep(0.1)
    # What it had done is there; SIGINT and SIGTERM had the running step saved.
    metrics = next(path.parents[2] for path in set(copied.home.glob(CHECKPOINTS)) - before) / "metrics.jsonl"
    newest = max(int(path.parent.name[5:]) for path in metrics.parent.glob("checkpoints/step_*/manifest.json"))
    if number != signal.SIGKILL:
        assert newest == len(metrics.read_text(encoding="utf-8").splitlines())
    else:
        explained = ppoflow("explain", copied.config, *settings, home=copied.home)
        training = next(line for line in explained.stdout.splitlines() if line.startswith("train_policy"))
        assert f"resumes  from step {newest} of 1000" in training
