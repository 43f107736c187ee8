"""Locks between real processes: one holder at a time, and a dead holder holds nothing."""

import subprocess
import sys
import threading
from pathlib import Path

from rl_core.locks import locked

HOLD = """
import sys; from pathlib import Path; from rl_core.locks import locked
with locked(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True); sys.stdin.read()
"""


def holder(path: Path, kind: str = "exclusive") -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_waiter_is_told_who_holds_and_goes_on_when_the_holder_is_killed(tmp_path):
    process = holder(tmp_path / "lock")
    said: list[str] = []

    def kill(who: str) -> None:
        said.append(who)
        process.kill()

    with locked(tmp_path / "lock", on_wait=kill, poll_seconds=0.01):
        assert process.wait() == -9
    assert said
    assert f"process {process.pid} on" in said[0]


def test_shared_holders_do_not_exclude_each_other_but_the_exclusive_one_waits_for_all(tmp_path):
    first, second = holder(tmp_path / "lock", "shared"), holder(tmp_path / "lock", "shared")
    waiting, got = threading.Event(), threading.Event()

    def wait() -> None:
        with locked(tmp_path / "lock", on_wait=lambda who: waiting.set(), poll_seconds=0.01):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30)
    first.communicate()
    assert not got.is_set()
    second.communicate()
    thread.join(30)
    assert got.is_set()


def test_a_child_does_not_inherit_the_lock(tmp_path):
    with locked(tmp_path / "lock"):
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        child.stdout.readline()
    waited: list[str] = []
    with locked(tmp_path / "lock", on_wait=waited.append):
        assert not waited
    child.communicate()
