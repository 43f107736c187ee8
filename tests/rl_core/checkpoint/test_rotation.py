"""What is kept, what waits, what is asked before anything is written, and which formats are read."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from rl_core.checkpoint import formats, room
from rl_core.checkpoint.deadline import MARGIN_S, SLURM_END, Deadline
from rl_core.checkpoint.rotation import in_use
from rl_core.checkpoint.steps import Checkpoints
from rl_core.errors import ConfigError, StoreError

HOLD = (
    "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH);"
    " print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


def save(checkpoints: Checkpoints, step: int, **metrics: float) -> None:
    checkpoints.save(step, {"a": torch.full((50,), float(step))}, {"n": step}, "key", metrics)


def test_the_best_is_kept_however_old(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2, best="val/reward/mean")
    for step, reward in enumerate((0.1, 0.7, 0.3, 0.7, 0.2), start=1):
        save(checkpoints, step, **{"val/reward/mean": reward, "other": -reward})
    assert checkpoints.steps() == [2, 4, 5], "of equal ones the earlier"
    checkpoints = Checkpoints(tmp_path / "c", 2, best="val/reward/mean")  # what is best is read from the disk
    save(checkpoints, 6)  # no validation at this step
    assert checkpoints.steps() == [2, 5, 6]
    save(checkpoints, 7, **{"val/reward/mean": 0.9})
    save(checkpoints, 8)
    save(checkpoints, 9)
    assert checkpoints.steps() == [7, 8, 9]


def test_one_that_is_read_elsewhere_is_kept_until_it_is_not(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2)
    save(checkpoints, 1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(checkpoints.path(1))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert checkpoints.steps() == [1, 3, 4]
    holder.kill()  # the lock dies with its holder
    holder.wait()
    save(checkpoints, 5)
    assert checkpoints.steps() == [4, 5]
    holder.stdin.close()
    holder.stdout.close()


def test_reading_says_that_it_is_in_use(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2)
    save(checkpoints, 1)
    with in_use(checkpoints.path(1)):
        descriptor = os.open(checkpoints.path(1), os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    with pytest.raises(StoreError, match="not there"), in_use(checkpoints.path(9)):
        pass


def test_two_whole_ones_are_left_whatever_else_lies_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 3)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints = Checkpoints(tmp_path / "c", 2)
    (checkpoints.path(3) / "manifest.json").unlink()
    save(checkpoints, 4)
    assert checkpoints.steps() == [2, 4], "the damaged one does not count"


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2)
    save(checkpoints, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(StoreError, match=r"does not fit.*checkpoint\.keep"):
        save(checkpoints, 2)  # 50 floats
    assert checkpoints.steps() == [1]
    room.check_room(tmp_path / "not" / "yet", 100, "A policy")


@pytest.mark.parametrize(
    ("keep", "present", "coming", "more"), [(2, 0, 9, 3), (2, 2, 9, 1), (2, 0, 1, 1), (5, 3, 1, 1), (2, 4, 3, 0), (2, 2, 0, 0)]
)
def test_how_many_there_will_be_at_once(keep: int, present: int, coming: int, more: int) -> None:
    assert room.at_once(keep, present, coming) == more


def test_bytes_are_those_on_the_disk(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(300, 1000), "b": torch.zeros(1000, dtype=torch.bfloat16)}
    Checkpoints(tmp_path / "c", 2).save(1, tensors, {}, "key")
    written = sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert written <= room.stored_bytes(tensors) <= 1.03 * written


def rewritten(path: Path, **changes: int) -> None:
    """A state.json as another release writes it, in a checkpoint that is whole."""
    from rl_core.artifacts import commit

    state = json.loads((path / "state.json").read_text()) | changes
    (path / "state.json").write_text(json.dumps({name: value for name, value in state.items() if value is not None}))
    (path / "manifest.json").unlink()
    scratch = path.with_name("scratch")
    path.rename(scratch)
    commit(scratch, path, kind="checkpoint", key="key", results={"step": 1})


def test_a_newer_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2)
    save(checkpoints, 1)
    rewritten(checkpoints.path(1), format=formats.FORMAT + 1)
    with pytest.raises(StoreError, match=r"format 2, and this release of ppoflow reads up to 1.*--fresh"):
        checkpoints.latest()
    assert checkpoints.steps() == [1], "it is not set aside: it is whole"
    manifest = json.loads((checkpoints.path(1) / "manifest.json").read_text())
    (checkpoints.path(1) / "manifest.json").write_text(json.dumps(manifest | {"format": 7}))
    with pytest.raises(StoreError, match="format 7"):
        checkpoints.latest()


def test_an_older_format_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "c", 2)
    save(checkpoints, 1)
    rewritten(checkpoints.path(1), format=None)  # as the first release wrote it
    artifact, tensors = checkpoints.latest(), {"a": torch.zeros(50)}
    assert artifact is not None
    assert checkpoints.load(artifact, tensors) == {"n": 1}
    monkeypatch.setattr(formats, "FORMAT", 3)
    monkeypatch.setattr(formats, "UPGRADES", {1: lambda state: {"m": state["n"]}, 2: lambda state: {**state, "new": 0}})
    assert checkpoints.load(artifact, tensors) == {"m": 1, "new": 0}


def test_the_wall_clock_limit() -> None:
    in_100_s = datetime.now(UTC) + timedelta(seconds=100)
    for deadline in (Deadline(in_100_s, {}), Deadline(None, {SLURM_END: str(in_100_s.timestamp())})):
        assert not deadline.too_near(step_seconds=10, save_seconds=10)
        assert not deadline.too_near(step_seconds=10, save_seconds=30)
        assert deadline.too_near(step_seconds=60, save_seconds=10), f"75 s and {MARGIN_S} s are more than 100"
        assert deadline.too_near(step_seconds=10, save_seconds=10), "the next one may be as slow as the slowest"
    assert not Deadline(None, {}).too_near(1e9, 1e9)
    naive = datetime.now() + timedelta(hours=1)  # of the local clock
    assert not Deadline(naive, {}).too_near(1, 1)
    with pytest.raises(ConfigError, match=r"checkpoint\.must_save_by = 2020-01-01T00:00:00 is over already"):
        Deadline(datetime(2020, 1, 1), {})


def test_a_clock_that_is_set_does_not_move_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(datetime.now(UTC) + timedelta(seconds=100), {})
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert not deadline.too_near(10, 10)
    assert deadline.too_near(80, 10)
