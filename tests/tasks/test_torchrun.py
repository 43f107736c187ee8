import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rl_core.config.trainer import LaunchConfig
from rl_core.errors import EXIT_CRASH, EXIT_INTERRUPTED, EXIT_USER, ConfigError, Interrupted
from tasks import torchrun
from tasks.agent import verdict
from tasks.torchrun import ROOT, RanksCrashed, run_ranks

RANK_PROGRAM = "tests.tasks.rank_program"
TWO = LaunchConfig(device="cpu", nproc_per_node=2, threads_per_rank=1)
FLOW = (
    "import sys; from pathlib import Path; from rl_core.config.trainer import LaunchConfig; from tasks.torchrun import run_ranks;"
    "d = Path(sys.argv[2]); run_ranks('tests.tasks.rank_program', [sys.argv[1], str(d)],"
    " launch=LaunchConfig(device='cpu', nproc_per_node=2), log_path=d / 'log', grace_seconds=float(sys.argv[3]))"
)


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def started(directory: Path, ranks: int = 2) -> bool:
    return all((directory / f"pid-{rank}").exists() for rank in range(ranks))


def alive(directory: Path) -> list[int]:
    pids = [int(path.read_text()) for path in directory.glob("pid-*")]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def run(mode: str, directory: Path, **options) -> None:
    run_ranks(RANK_PROGRAM, [mode, str(directory)], launch=TWO, log_path=directory / "log", **options)


def test_done_logs_every_line(tmp_path):
    lines: list[str] = []
    run("done", tmp_path, on_line=lines.append)
    log = (tmp_path / "log").read_text()
    for said in ("rank 0 of 2 threads 1", "rank 1 of 2 threads 1"):  # ranks that print at the same time share lines
        assert any(said in line for line in lines)
        assert said in log


def test_message_for_the_user_comes_through(tmp_path):
    with pytest.raises(ConfigError, match=r"^reward.path = nowhere.py: there is no such file\.$"):
        run("user", tmp_path)


def test_crash_names_log_and_last_lines(tmp_path):
    with pytest.raises(RanksCrashed, match="the reward is on fire") as caught:
        run("crash", tmp_path)
    assert str(tmp_path / "log") in str(caught.value)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(torchrun, "STRAGGLER_SECONDS", 6.0)


@pytest.mark.usefixtures("impatient")
def test_message_of_one_rank_while_the_other_has_to_be_killed(tmp_path):
    """However much is printed after it."""
    with pytest.raises(ConfigError, match=r"^trainer.seed: nobody likes it\.$"):
        run("user-and-straggler", tmp_path)
    assert alive(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_rank_that_stays_when_another_has_ended_well(tmp_path):
    with pytest.raises(RanksCrashed, match="rank 0 was killed by SIGKILL"):
        run("done-and-straggler", tmp_path)
    assert alive(tmp_path) == []


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([(0, 2)], EXIT_USER),
        ([(0, 1), (1, 2)], EXIT_USER),  # the peer of the one that speaks to the user saw the connection end, and was faster
        ([(0, 2), (30, -9)], EXIT_USER),
        ([(0, -9), (0, 1)], EXIT_CRASH),
        ([(1, -9), (0, 2)], EXIT_CRASH),  # found at the same time, just before and after a full second
        ([(0, -9), (4, 75)], EXIT_CRASH),
        ([(0, 75), (0, -15)], EXIT_INTERRUPTED),
        ([(0, 75), (30, -9)], EXIT_INTERRUPTED),
        ([(0, 75), (0, 1)], EXIT_CRASH),
        ([(0, -11), (30, -9)], EXIT_CRASH),
        ([(0, 1), (30, -9)], EXIT_CRASH),
    ],
)
def test_one_exit_code_for_all_ranks(failures, code):
    assert verdict(failures) == code


@pytest.mark.usefixtures("impatient")
def test_rank_killed_while_the_other_hangs(tmp_path):
    """The other rank waits for ever and does not heed SIGTERM, as in a collective."""
    with pytest.raises(RanksCrashed, match="rank 1 was killed by SIGKILL"):
        run("peer-dies", tmp_path)
    assert alive(tmp_path) == []


def test_lines_arrive_live_and_an_error_of_the_callback_stops_the_ranks(tmp_path):
    class Seen(Exception):
        pass

    def on_line(line: str) -> None:
        if line.startswith("rank"):  # the ranks are still running: they end only when told to
            raise Seen

    with pytest.raises(Seen):
        run("serve", tmp_path, on_line=on_line, grace_seconds=20)
    assert alive(tmp_path) == []


def test_ranks_stopped_from_elsewhere(tmp_path):
    """As a batch system does it: SIGTERM to the ranks, nothing to the flow."""

    def terminate() -> None:
        assert wait_for(lambda: started(tmp_path))
        os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGTERM)

    killer = threading.Thread(target=terminate)
    killer.start()
    with pytest.raises(Interrupted):
        run("serve", tmp_path)
    killer.join()


@pytest.mark.parametrize(
    ("mode", "number", "grace", "saved"),
    [
        ("serve", signal.SIGINT, 20, True),
        ("deaf", signal.SIGINT, 1, False),
        ("grandchild", signal.SIGINT, 0, False),
        ("deaf", signal.SIGKILL, 20, False),
    ],
)
def test_signal_to_the_flow(tmp_path, mode, number, grace, saved):
    """Whatever ends the flow's process, no rank is left; with grace the ranks save first."""
    flow = subprocess.Popen([sys.executable, "-c", FLOW, mode, str(tmp_path), str(grace)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: started(tmp_path))
        agent = psutil.Process(flow.pid).children()[0]
        flow.send_signal(number)
        flow.wait(timeout=60)
        assert wait_for(lambda: not alive(tmp_path) and not agent.is_running(), seconds=10)
    finally:
        flow.kill()
    assert all((tmp_path / f"saved-{rank}").exists() == saved for rank in range(2))


def test_agent_killed(tmp_path):
    """The ranks die with torchrun's agent."""

    def kill() -> None:
        assert wait_for(lambda: started(tmp_path))
        rank = psutil.Process(int((tmp_path / "pid-0").read_text()))
        os.kill(rank.ppid(), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RanksCrashed, match="signal 9"):
        run("deaf", tmp_path)
    killer.join()
    assert alive(tmp_path) == []


def test_child_of_a_parent_that_is_already_gone(tmp_path):
    environment = os.environ | {"PPOFLOW_PARENT_PID": "1"}
    child = subprocess.run(
        [sys.executable, "-c", "from rl_core.process import die_with_parent; die_with_parent(); print('alive')"],
        env=environment, cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, b"")


def test_program_from_a_shell_may_outlive_it():
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    code = (
        "import ctypes, json; from rl_core.process import die_with_parent; die_with_parent(); s = ctypes.c_int();"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(s)); print(json.dumps(s.value))"
    )
    child = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(child.stdout) == 0
