"""Locks between real processes: one holder at a time, and a dead holder holds nothing."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_core.errors import StoreError
from rl_core.locks import locked, tried

HOLD = """
import sys; from pathlib import Path; from rl_core import locks; from rl_core.locks import locked
locks.BEAT_SECONDS = 0.02
with locked(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("held", flush=True); sys.stdin.read()
"""


def holder(path: Path, kind: str = "exclusive", host: tuple[str, ...] = ()) -> subprocess.Popen:
    process = subprocess.Popen(
        [*host, sys.executable, "-c", HOLD, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


class Enough(Exception):
    pass


def test_a_stopped_holder_is_named_to_the_waiter_with_what_to_do(tmp_path):
    process = holder(tmp_path / "lock")
    process.send_signal(signal.SIGSTOP)
    said: list[str] = []

    def listen(who: str) -> None:
        said.append(who)
        if "sign of life" in who:
            process.send_signal(signal.SIGCONT)
            process.stdin.close()

    with locked(tmp_path / "lock", on_wait=listen, poll_seconds=0.01, silent_seconds=0.3):
        assert process.wait() == 0
    name = f"process {process.pid} on {os.uname().nodename}"
    assert said[0] == name
    assert len(said) == 2
    assert said[1].startswith(f"{name} (no sign of life for 0 s: stopped or hanging; on that host ")
    assert f"`kill -CONT {process.pid}` lets it go on and `kill -KILL {process.pid}` frees the lock" in said[1]


def test_a_working_holder_is_not_said_to_be_silent(tmp_path):
    """It lives ten times as long as a silent one is borne: that is counted in its signs of life."""
    process, signs, said = holder(tmp_path / "lock"), set(), []

    def wait() -> None:
        with locked(tmp_path / "lock", on_wait=said.append, poll_seconds=0.01, silent_seconds=2):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    while len(signs) < 20:
        signs.add((tmp_path / "lock").stat().st_mtime_ns)
    process.communicate()
    thread.join()
    assert said == [f"process {process.pid} on {os.uname().nodename}"]


def test_a_holder_on_another_host_is_waited_for_and_named(tmp_path):
    """Another host is a process with other process numbers and another name that sees the same disk."""
    host = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*host, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces may not be made here")
    process = holder(tmp_path / "lock", host=host)
    with tried(tmp_path / "lock") as held:
        assert not held
    said: list[str] = []

    def kill(who: str) -> None:
        said.append(who)
        process.kill()

    with locked(tmp_path / "lock", on_wait=kill, poll_seconds=0.01):
        process.wait()
    assert said == ["process 1 on elsewhere"]


def test_one_who_held_it_before_is_not_named(tmp_path):
    process = holder(tmp_path / "lock")
    process.kill()
    process.wait()
    said: list[str] = []
    ranks = holder(tmp_path / "lock", "shared")

    def release(who: str) -> None:
        said.append(who)
        ranks.kill()

    with locked(tmp_path / "lock", on_wait=release, poll_seconds=0.01):
        assert ranks.wait() == -9
    assert said == ["another process"]


def test_who_waited_for_a_lock_that_is_deleted_holds_the_new_one(tmp_path):
    waiting, got, done = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        with locked(tmp_path / "lock", on_wait=lambda who: waiting.set(), poll_seconds=0.01):
            got.set()
            done.wait(30)

    thread = threading.Thread(target=wait)
    with tried(tmp_path / "lock") as held:
        assert held
        thread.start()
        assert waiting.wait(30)
        (tmp_path / "lock").unlink()
    assert got.wait(30)
    with tried(tmp_path / "lock") as held:
        assert not held
    done.set()
    thread.join()


def test_a_lock_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StoreError, match=r"lock .*file/lock cannot be made \(.*\)\. Set PPOFLOW_HOME"),
        locked(tmp_path / "file" / "lock"),
    ):
        pass
