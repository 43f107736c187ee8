"""What `ppoflow status` knows of runs, from files as the training writes them and from locks of real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from rl_core.artifacts import commit, fresh_scratch
from rl_core.distributed import World
from rl_core.errors import ConfigError
from rl_core.metrics import RunLog
from tasks.lines import rows
from tasks.runs import Run
from tasks.status import find_runs, runs, stages, status_of
from tests.tasks.settings import config

HOLD = """
import sys; from pathlib import Path; from rl_core.locks import locked
with locked(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True); sys.stdin.read()
"""


def begun(tmp_path: Path, letter: str, steps: int = 40, name: str = "sums") -> Run:
    """A run directory as the task leaves it before the first step."""
    run = Run(letter * 64, {}, steps)
    run.directory.mkdir(parents=True)
    text = yaml.safe_dump(config(tmp_path, registry__name=name).model_dump(mode="json"))
    (run.directory / "config.yaml").write_text(text, encoding="utf-8")
    run.write_segments(run.segments({"code": "a"}))
    return run


def log_steps(run: Run, first: int, end: int) -> None:
    """Step i has reward i / 10, takes i + 1 seconds, 100 tokens a second."""
    log = RunLog(run.directory, World(0, 1, torch.device("cpu")), run.steps, first, progress=False)
    for step in range(first, end):
        metrics = {"critic/score/mean": step / 10, "perf/time_per_step": step + 1.0, "perf/total_num_tokens": 100 * (step + 1.0)}
        log.step(step, metrics, [{"sample": 0, "prompt": "p", "response": f"r{step}", "reward": step / 10, "ground_truth": None}])


def saved(run: Run, step: int, name: str | None = None) -> None:
    final = run.directory / (name or f"checkpoints/step_{step:06d}")
    scratch = fresh_scratch(final)
    (scratch / "tensors").write_bytes(b"x" * 100_000)
    commit(scratch, final, kind="checkpoint", key=run.key, results={"step": step})


@contextmanager
def holder(lock: Path, kind: str = "exclusive") -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_from_its_begin_to_its_end(home: Path, tmp_path: Path) -> None:
    run = begun(tmp_path, "a")
    with holder(run.lock_path) as flow:
        status = status_of(run.directory)
        assert (status.state, status.name, status.step, status.steps) == ("running", "sums", 0, 40)
        assert (status.reward, status.s_per_step, status.left_s, status.checkpoint) == (None, None, None, None)
        assert status.holder is not None
        assert f"process {flow.pid} on" in status.holder
        log_steps(run, 0, 30)
        saved(run, 20)
        saved(run, 25)
        (run.directory / "checkpoints" / "step_000028").mkdir()  # being deleted, or not from here: it has no manifest
        status = status_of(run.directory)
        assert (status.step, status.state) == (30, "running")
        assert status.reward == pytest.approx(2.45)  # of steps 20 to 29
        assert status.reward_change == pytest.approx(1.0)
        assert status.s_per_step == pytest.approx(25.5)
        assert status.tokens_per_s == pytest.approx(100.0)
        assert status.left_s == pytest.approx(10 * 25.5)
        assert status.checkpoint is not None
        assert status.checkpoint.step == 25
        assert 200_000 <= status.bytes < 400_000
        flow.kill()
        flow.wait()
    stopped = status_of(run.directory)
    assert (stopped.state, stopped.holder, stopped.step) == ("stopped", None, 30)
    assert stopped.left_s == pytest.approx(15 * 25.5), "what comes behind the checkpoint is made again"
    log_steps(run, 25, 40)
    saved(run, 40, "policy")
    finished = status_of(run.directory)
    assert (finished.state, finished.step, finished.left_s) == ("finished", 40, None)
    assert finished.reward == pytest.approx(3.45)
    longer = Run(run.key, {}, 50)  # trainer.max_steps was raised
    longer.write_segments(longer.segments({"code": "a"}))
    assert status_of(run.directory).state == "stopped"


def test_ranks_that_outlive_their_flow_are_running(home: Path, tmp_path: Path) -> None:
    run = begun(tmp_path, "b")
    with holder(run.directory / "ranks.lock", "shared"):
        assert (status_of(run.directory).state, status_of(run.directory).holder) == ("running", "its ranks")
    assert status_of(run.directory).state == "stopped"


def test_ages_are_those_of_the_files(home: Path, tmp_path: Path) -> None:
    run = begun(tmp_path, "c")
    log_steps(run, 0, 3)
    saved(run, 2)
    now = time.time()
    os.utime(run.directory / "metrics.jsonl", (now - 100, now - 100))
    os.utime(run.directory / "checkpoints" / "step_000002" / "manifest.json", (now - 300, now - 300))
    status = status_of(run.directory)
    assert status.last_step_age_s == pytest.approx(100, abs=60)
    assert status.checkpoint is not None
    assert status.checkpoint.age_s == pytest.approx(300, abs=60)


def test_runs_of_a_home_and_which_of_them_a_user_means(home: Path, tmp_path: Path) -> None:
    assert runs() == []
    old, new, live = (begun(tmp_path, letter, name=name) for letter, name in (("a", "old"), ("b", "new"), ("c", "live")))
    for age, run in enumerate((new, old, live)):
        log_steps(run, 0, 1)
        for name in ("metrics.jsonl", "config.yaml"):
            os.utime(run.directory / name, (1e9 - age, 1e9 - age))
    (home / "runs" / f".{old.key}.replaced-0").mkdir()  # what --fresh moved aside
    with holder(live.lock_path):
        assert [run.name for run in runs()] == ["live", "new", "old"]
    assert [run.key for run in find_runs("bbb")] == [new.key]
    assert [run.key for run in find_runs("old")] == [old.key]
    elsewhere = tmp_path / "elsewhere"
    os.rename(old.directory, elsewhere)
    assert [run.path for run in find_runs(str(elsewhere))] == [str(elsewhere)]
    with pytest.raises(ConfigError, match=r"no run 'old'.* new \(bbbbbbbb\)"):
        find_runs("old")


def test_damaged_files_hide_what_they_held_and_no_more(home: Path, tmp_path: Path) -> None:
    run = begun(tmp_path, "d")
    log_steps(run, 0, 2)
    (run.directory / "config.yaml").write_text("{", encoding="utf-8")
    (run.directory / "segments.json").write_text("[", encoding="utf-8")
    with (run.directory / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"step": "x"}\n{"step": 2, "critic/score/mean": 9')
    (status,) = runs()
    assert (status.name, status.steps, status.step, status.reward) == ("dddddddd", None, 2, pytest.approx(0.05))


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)), encoding="utf-8")
    line = len('{"step": 999}\n')
    assert [row["step"] for row in rows(path, 3 * line)] == [998, 999], "the first of three was begun before"
    assert len(list(rows(path, 10**6))) == 1000
    assert list(rows(tmp_path / "none")) == []


def test_stages_that_are_being_made(home: Path) -> None:
    store = home / "store"
    for stage in ("tokenize_dataset", "train_policy", "convert_checkpoint"):
        (store / stage).mkdir(parents=True)
        (store / stage / f".{'e' * 64}.lock").touch()
    with holder(store / "tokenize_dataset" / f".{'e' * 64}.lock") as one, holder(store / "train_policy" / f".{'e' * 64}.lock"):
        (making,) = stages()
        assert (making["stage"], making["key"]) == ("tokenize_dataset", "e" * 64)
        assert f"process {one.pid} on" in making["holder"]
    assert stages() == []
