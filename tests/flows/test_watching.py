"""`ppoflow status` and `ppoflow samples` on the files of a training, as a user calls them."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flows.cli import main
from flows.commands.samples import visible
from flows.commands.status import curve
from rl_core.artifacts import commit, fresh_scratch
from rl_core.distributed import World
from rl_core.errors import EXIT_DONE, EXIT_USER
from rl_core.locks import locked
from rl_core.metrics import RunLog
from tasks.runs import Run
from tests.pipeline import ROOT, environment

KEY = "ab" * 32


@pytest.fixture
def run(home: Path) -> Run:
    """A training of 8 steps that has done 6, of which 4 are saved."""
    run = Run(KEY, {}, 8)
    run.directory.mkdir(parents=True)
    values = {"registry": {"name": "sums"}, "model": {"name_or_path": "some/model"}}
    (run.directory / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    run.write_segments(run.segments({"code": "a"}))
    log = RunLog(run.directory, World(0, 1, torch.device("cpu")), run.steps, 0, progress=False)
    for step in range(6):
        metrics = {"critic/score/mean": step / 10, "perf/time_per_step": 2.0, "perf/total_num_tokens": 500.0}
        rows = [
            {"sample": n, "prompt": f"[b]{step}+{n}=", "response": f"\x1b[31m{step + n}", "reward": n / 2, "ground_truth": "7"}
            for n in range(2)
        ]
        log.step(step, metrics, rows)
    final = run.directory / "checkpoints" / "step_000004"
    scratch = fresh_scratch(final)
    (scratch / "tensors").write_bytes(b"x")
    commit(scratch, final, kind="checkpoint", key=KEY)
    return run


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_DONE) -> str:
    """What a command prints, or of an error its paragraph."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main(words)
    signal.signal(signal.SIGTERM, handler)
    assert (end.value.code or 0) == code
    printed = capsys.readouterr()
    if code == EXIT_DONE:
        assert printed.err == ""
    return printed.out or printed.err


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_DONE) -> Any:
    return json.loads(said(capsys, *words, "--json", code=code))


def test_status_says_how_far_and_how_long(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(run.lock_path):
        text = said(capsys, "status", "sums")
    assert "sums abababab  running by process" in text
    assert "step 6/8" in text
    assert "reward     0.250 ▁▂▄▅▇█" in text  # no change is told before there are twice so many steps
    assert "2.0 s/step, 250 tokens/s, about 4 s left" in text
    assert re.search(r"checkpoint step 4, \d+ s old, 0\.\d MB on disk", text)
    assert str(run.directory) in text.splitlines()[-1]


def test_status_of_a_stopped_run_is_the_users_turn(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped,) = document(capsys, "status", "abab", code=EXIT_USER)["runs"]
    assert (stopped["state"], stopped["step"], stopped["steps"]) == ("stopped", 6, 8)
    assert (stopped["checkpoint"]["step"], stopped["left_s"]) == (4, 8.0)
    assert len(document(capsys, "status")["runs"]) == 1, "nobody asked for it by name"
    assert "there is no run 'other'" in said(capsys, "status", "other", code=EXIT_USER)


def test_a_home_without_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No training has begun" in said(capsys, "status")
    assert document(capsys, "status") == {"runs": [], "stages": []}
    assert "no training has begun" in said(capsys, "samples", code=EXIT_USER)


def test_watching_imports_nothing_heavy(run: Run) -> None:
    program = (
        "import sys, flows.cli\n"
        "for command in ('status', 'samples'):\n"
        "    try: flows.cli.main([command])\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "print('heavy:', sorted({'prefect', 'mlflow', 'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    home = run.directory.parents[1]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(home), capture_output=True, text=True, check=True
    )
    assert "heavy: []" in result.stdout


def test_samples_are_readable_blocks(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "samples", "sums")
    lines = [line.rstrip("─ ") for line in text.splitlines()]
    assert lines == [
        "sums abababab",
        "step 5, sample 0, reward 0", "[b]5+0=", "\\x1b[31m5", "ground truth: 7",
        "step 5, sample 1, reward 0.5", "[b]5+1=", "\\x1b[31m6", "ground truth: 7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [(5, 0), (5, 1)]),
        (("--last", "2"), [(4, 0), (4, 1), (5, 0), (5, 1)]),
        (("--step", "3"), [(3, 0), (3, 1)]),
        (("--last", "2", "--sort", "reward"), [(4, 1), (5, 1), (4, 0), (5, 0)]),
    ],
)
def test_which_samples(run: Run, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], expected: list) -> None:
    shown = document(capsys, "samples", *options)
    assert (shown["run"], shown["name"]) == (KEY, "sums")
    assert [(row["step"], row["sample"]) for row in shown["samples"]] == expected


def test_samples_of_a_step_that_was_not_made(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no samples of step 6 are in" in said(capsys, "samples", "--step", "6", code=EXIT_USER)


def test_a_curve_has_its_lowest_and_highest_value_as_bars() -> None:
    assert curve([0.0, 7.0, 3.5]) == "▁█▅"
    assert curve([2.0, 2.0]) == "▁▁"


def test_a_response_has_no_power_over_the_terminal() -> None:
    assert visible("é 漢\n\t\x1b]0;title\x07\x85\u2028\u202e") == "é 漢\n\t\\x1b]0;title\\x07\\x85\\u2028\\u202e"
