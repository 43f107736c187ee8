"""Ranks as a supervised child: started by torchrun, logged live, told to stop politely, and never left behind.

    flow ── `tasks.agent` (torchrun's agent, a session of its own) ── ranks (a session each)

The agent and the ranks ask the kernel to die with their parent (`rl_core.process`), which covers SIGKILL. Everything else –
Ctrl-C, SIGTERM, Prefect's cancel, a timeout, an error in the flow – arrives as an exception where the lines are read. There
is no thread: callbacks run where the caller's context is, and their exceptions stop the ranks like any other.
"""

import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from rl_core.config.trainer import LaunchConfig
from rl_core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, ConfigError, Interrupted, PpoflowError
from rl_core.process import PARENT
from tasks.devices import rank_count, threads_per_rank

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
STRAGGLER_SECONDS = 30.0
"""Ranks end together: a barrier behind the export is the last thing that they do. One that stays this long after another has
ended waits for it in a collective. torchrun knows this rule only for ranks that failed, not for one that ended well."""
ERROR_PREFIX = "ppoflow: error: "
CAUSE = re.compile(r" ended by .+|^(\w+\.)*\w+(Error|Exception): .+")
"""What a rank says of the error in which it ends, or the last line of a traceback."""


class RanksCrashed(PpoflowError):
    """A rank died of something unforeseen; running again goes on from what was committed.

    Attributes:
        cause: the error in which a rank ended, "" where none could say so, since it was killed.
    """

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


def run_ranks(
    module: str,
    arguments: list[str],
    *,
    launch: LaunchConfig,
    log_path: Path,
    on_line: Callable[[str], None] | None = None,
    grace_seconds: float = 0.0,
    max_restarts: int = 0,
) -> None:
    """Run `torchrun --nproc_per_node=N -m <module> <arguments>` to its end. The ranks call `die_with_parent()` first thing.

    SIGUSR1, which batch systems send before they end a job, is passed on to the ranks as the request to save and end.

    Args:
        log_path: stdout and stderr of all ranks are appended to it.
        on_line: called with each line, in this thread; a slow one slows the ranks down.
        grace_seconds: when this thread is interrupted, the time that the ranks have to save and exit before they are killed.
        max_restarts: how often all ranks are started again after a crash; the same error as the time before ends it earlier.

    Raises:
        ConfigError: the ranks ended with a message for the user.
        Interrupted: the ranks were stopped by a signal that did not come from here.
        RanksCrashed: anything else.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    before = ""
    for left in reversed(range(max_restarts + 1)):
        try:
            return _run_once(module, arguments, launch, log_path, on_line, grace_seconds)
        except RanksCrashed as crash:
            if left == 0 or crash.cause == before != "":
                raise
            before = crash.cause
            logger.warning("%s All ranks are started again (%d restart(s) are left after this one).", crash, left - 1)


def _run_once(
    module: str,
    arguments: list[str],
    launch: LaunchConfig,
    log_path: Path,
    on_line: Callable[[str], None] | None,
    grace_seconds: float,
) -> None:
    tail: deque[str] = deque(maxlen=40)
    said: list[str] = []
    ranks = rank_count(launch)
    command = [
        sys.executable, "-u", "-m", "tasks.agent", "--standalone", "--max-restarts=0",
        f"--nproc-per-node={ranks}", "-m", module, *arguments,
    ]  # fmt: skip
    with log_path.open("a", encoding="utf-8", buffering=1) as log:

        def record(line: str) -> None:
            log.write(line + "\n")
            tail.append(line)
            said.extend(line.split(ERROR_PREFIX)[1:])  # anywhere in it: ranks that print at the same time share lines
            logger.info("%s", line)

        child = _Child(command, ranks, threads_per_rank(launch))
        try:
            with _on_usr1(child.ask_to_stop):
                for line in child.lines():
                    record(line)
                    if on_line is not None:
                        on_line(line)
        except BaseException:
            if grace_seconds > 0 and child.ask_to_stop():
                logger.info("Stopping: the ranks have %.0f s to finish the running step and save it.", grace_seconds)
                for line in child.lines(limit_seconds=grace_seconds):
                    record(line)
            raise
        finally:  # reached at once by a second Ctrl-C
            child.kill()
    _raise_for(child.process.returncode, module, said, list(tail), log_path)


class _Child:
    """The agent's process and all that descends from it."""

    def __init__(self, command: list[str], ranks: int, threads: int) -> None:
        environment = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(threads),
            PARENT: str(os.getpid()),
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the flow alone
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout.fileno()
        os.set_blocking(self.pipe, False)
        self.rest = b""
        self.family: list[psutil.Process] = []
        self.looked = self.complete = time.monotonic()
        self.expected_ranks = ranks

    def lines(self, limit_seconds: float | None = None) -> Iterator[str]:
        """The output line by line as it comes, until the agent has ended or the time is over. May be called again."""
        started, ended = time.monotonic(), False
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while not ended and (limit_seconds is None or time.monotonic() - started < limit_seconds):
                ended = self.process.poll() is not None  # asked before reading, so that its last words are read
                selector.select(0 if ended else 0.2)
                yield from self._available()
                if time.monotonic() - self.looked > 1:
                    self._look_after()
        if ended and self.rest:
            yield self.rest.decode(errors="replace")

    def _available(self) -> Iterator[str]:
        """The complete lines that the pipe holds now; its end is not waited for, a stray grandchild may hold it open."""
        try:
            block = os.read(self.pipe, 1 << 20)
        except BlockingIOError:
            return
        if not block:
            time.sleep(0.05)  # closed, while the agent has yet to end
        *lines, self.rest = (self.rest + block).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)

    def _look_after(self) -> list[psutil.Process]:
        """Remember the descendants (those of a dead rank can no longer be found), end stragglers; returns the live ranks."""
        self.looked = time.monotonic()
        try:
            agent = psutil.Process(self.process.pid)
            ranks = [child for child in agent.children() if child.status() != psutil.STATUS_ZOMBIE]
            self.family = list({*(process for process in self.family if process.is_running()), *agent.children(recursive=True)})
        except psutil.NoSuchProcess:
            return []
        if not 0 < len(ranks) < self.expected_ranks:
            self.complete = self.looked
        elif self.looked - self.complete > STRAGGLER_SECONDS:
            logger.warning("%d rank(s) did not end although another one did; they are killed.", len(ranks))
            _send(ranks, signal.SIGKILL)
        return ranks

    def ask_to_stop(self) -> bool:
        """SIGTERM to the ranks; False if there are none. Not to the agent, which would not look at their exit codes."""
        ranks = self._look_after()
        _send(ranks, signal.SIGTERM)
        return bool(ranks)

    def kill(self) -> None:
        """SIGKILL to the agent and its descendants. Each rank has a session of its own: no group holds them all."""
        self._look_after()
        if self.process.poll() is None:
            self.process.kill()
        _send(self.family, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(self.family, timeout=5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def _on_usr1(action: Callable[[], object]) -> Iterator[None]:
    """Within the block SIGUSR1 calls `action`. Only the main thread can take signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _raise_for(code: int, module: str, said: list[str], tail: list[str], log_path: Path) -> None:
    """The error that an exit code of the agent stands for; `said` are the ranks' messages for the user."""
    if code == EXIT_DONE:
        return
    if code == EXIT_INTERRUPTED:
        raise Interrupted(f"{module} was stopped by a signal. Run the same command again to go on; its log is {log_path}.")
    if code == EXIT_USER and said:
        raise ConfigError(said[0])
    last = [line for line in tail if line.strip()][-12:]
    killed = code < 0 or any("was killed by SIG" in line for line in last)
    found = next((match for line in tail if (match := CAUSE.search(line))), None)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RanksCrashed(
        f"{module} ended with {how}. Run the same command again: nothing that was committed, a checkpoint included, is computed "
        f"again. Its whole log is {log_path}; the last lines are:\n" + "\n".join(last),
        cause="" if killed or found is None else found[0],
    )
