"""`torchrun` without its seconds of imports: torch's own elastic agent, with `tasks.agent`'s exit codes, whose ranks are forked
from a process that has imported all that they need. Ranks and agent are processes of their own, and die of signals as any other.

The process that forks must have no threads: it imports, and leaves everything else to those that it forks.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LIMIT_SECONDS = 300.0
PRELOADED = (
    "torch", "torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "torch.optim", "torch.utils.checkpoint",
    "transformers.models.llama.modeling_llama", "transformers.generation.utils", "tokenizers", "sqlite3", "multiprocessing.pool",
    "rl_core.train", "rl_core.experience", "rl_core.rewards.isolated", "rl_core.rewards.function",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a group of ranks ended."""

    code: int | None
    """The agent's; negative for a signal, None: it hung and was killed."""
    log: str
    seconds: float
    orphans: list[str]
    """Processes that were left when the agent was gone."""


def preload() -> None:
    """Import what ranks need, adopt whatever a dead parent leaves behind, and see to it that there are no threads."""
    import importlib

    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    _adopt()


def at_once(jobs: int, work: Callable[[int], None]) -> None:
    """Call it with each number below `jobs`, each in a forked process that adopts as this one does; raises if one fails."""
    pids = []
    for job in range(jobs):
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            _adopt()
            work(job)
            code = 0
        except BaseException:  # noqa: BLE001 – printed, and told by the exit code
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * jobs


def call(function: Callable[[], Any]) -> None:
    """Call it in a forked process; raises if that fails."""
    pid = _fork(function, os.devnull)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"{function} failed in a process of its own"


def train(
    arguments: Sequence[str],
    ranks: int,
    log: Path,
    in_rank: Callable[[int], None] = lambda rank: None,
    environment: dict[str, str] | None = None,
) -> Ended:
    """Run `rl_core.train` on so many ranks to its end.

    Args:
        log: stdout and stderr of all are appended to it.
        in_rank: called in each rank before anything else.
    """
    began, size = time.monotonic(), log.stat().st_size if log.exists() else 0
    agent = _fork(lambda: _agent(list(arguments), ranks, in_rank, environment or {}), str(log))
    code = _waited(agent)
    orphans = _orphans()
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(size)
        return Ended(code, file.read(), time.monotonic() - began, orphans)


def _agent(arguments: list[str], ranks: int, in_rank: Callable[[int], None], environment: dict[str, str]) -> int:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from rl_core.process import PARENT, die_with_parent
    from tasks.agent import supervised

    os.environ[PARENT] = str(os.getppid())
    die_with_parent()
    os.environ |= environment
    os.environ[PARENT] = str(os.getpid())
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=f"faults-{os.getpid()}", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.05, start_method="fork",
    )  # fmt: skip
    return supervised(lambda: elastic_launch(launch, _rank)(arguments, in_rank))


class _Done(BaseException):
    """A rank that has ended well returns, since the agent waits for what its function returns."""


def _rank(arguments: list[str], in_rank: Callable[[int], None]) -> None:
    from rl_core import train as program
    from rl_core.entry import run_program
    from rl_core.process import die_with_parent

    die_with_parent()
    leave = os._exit

    def leaving(code: int) -> None:
        if code == 0:
            raise _Done
        leave(code)

    os._exit = leaving  # type: ignore[assignment]
    sys.argv = ["rl_core.train", *arguments]
    in_rank(int(os.environ["RANK"]))
    try:
        run_program(program.main)
    except _Done:
        os._exit = leave


def _adopt() -> None:
    import ctypes

    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER


def _fork(function: Callable[[], Any], log: str) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(descriptor), "w", buffering=1) for _ in range(2))
        code = function() or 0
    except BaseException:  # noqa: BLE001 – printed, and told by the exit code
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(agent: int) -> int | None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(agent, 9)
    os.waitpid(agent, 0)
    return None


def _orphans(seconds: float = 10.0) -> list[str]:
    """The descendants that outlive the agent; ended here. They may take a moment to die."""
    children = psutil.Process().children(recursive=True)
    mine = [child for child in children if "sleep" not in _words(child)]  # which wakes what was stopped
    _, alive = psutil.wait_procs(mine, timeout=seconds)
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in alive:
        process.kill()
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass
    return [f"{process.pid} {_words(process)[:80]}" for process in alive]


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def as_json(value: Any) -> str:
    """One line."""
    return json.dumps(value, sort_keys=True)
