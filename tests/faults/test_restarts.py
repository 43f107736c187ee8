"""Dead ranks are started again by themselves, a bounded number of times; a user's turn and a signal are not."""

import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from rl_core.config.trainer import LaunchConfig
from rl_core.errors import ConfigError, Interrupted
from tasks.torchrun import RanksCrashed, run_ranks

TWO = LaunchConfig(device="cpu", nproc_per_node=2, threads_per_rank=1)
ONE = LaunchConfig(device="cpu", nproc_per_node=1, threads_per_rank=1)


def run(mode: str, directory: Path, launch: LaunchConfig = ONE, max_restarts: int = 3) -> None:
    arguments = [mode, str(directory)]
    run_ranks("tests.faults.restart_program", arguments, launch=launch, log_path=directory / "log", max_restarts=max_restarts)


def starts(directory: Path, rank: int = 0) -> list[str]:
    return (directory / f"starts-{rank}").read_text().splitlines()


def test_all_ranks_are_started_again_when_one_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tasks.torchrun"):
        run("killed twice", tmp_path, TWO)
    assert len(starts(tmp_path, 1)) == 3
    assert caplog.text.count("All ranks are started again") == 2
    assert "rank 1 was killed by SIGKILL" in caplog.text


def test_no_more_often_than_that(tmp_path: Path) -> None:
    with pytest.raises(RanksCrashed, match="killed by SIGKILL"):
        run("killed for ever", tmp_path, max_restarts=1)
    assert len(starts(tmp_path)) == 2


def test_the_same_error_twice_is_not_tried_a_third_time(tmp_path: Path) -> None:
    with pytest.raises(RanksCrashed, match="ValueError 0"):
        run("same error", tmp_path)
    assert len(starts(tmp_path)) == 2


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nobody likes it"):
        run("user", tmp_path)
    assert len(starts(tmp_path)) == 1


def test_sigusr1_asks_the_ranks_to_save_and_end(tmp_path: Path) -> None:
    """As a batch system sends it to the flow before the job's end. The one that was there before has its place again."""
    ended = threading.Event()

    def ask() -> None:
        while not (tmp_path / "ready-0").exists() and not ended.wait(0.02):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with pytest.raises(Interrupted):
            run("serve", tmp_path)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        ended.set()
        asking.join()
        signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "saved-0").exists()
    assert len(starts(tmp_path)) == 1
