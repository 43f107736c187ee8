"""Strikes a running process at a chosen point, from within it and without a line in the product.

A rank of a real run gets it through `sitecustomize`, one that was forked (tests/faults/forked.py) through a call. It wraps what
the product calls anyway: `rl_core.stall.enter`, which each phase calls, and `os.fsync`, `os.rename` and `Path.write_text`, which
a save and a stage call. Each fault strikes once for all processes of a case and all times that they are started.
"""

import json
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

VARIABLE = "PPOFLOW_TEST_FAULT"
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
SAVE_POINTS = ("shard", "index", "state", "manifest", "before rename", "after rename", "rotation")
STOPPED_SECONDS = 0.5
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Fault:
    """What strikes where.

    Attributes:
        point: a phase, `save: …` with one of SAVE_POINTS, or (in a flow) `store: …` with a stage (before its result has its
            name), `files: …` with one (a file of its result is opened, made or renamed), `commits` (of MLflow's database).
        step: of a phase; of a save the number of steps done; of files and commits which one; None: whichever is first.
        rank: that meets the point; None: the flow's process.
        victim: `self`, `other` (another rank), `agent` or `flow`.
        how: KILL, TERM, USR1, STOP (which goes on after a while), `clock` (a day back), `full` (the disk); `tell`: nothing
            strikes, and `fired` gets the name of each write, see `tell_writes`.
        fired: a file, beside the run directory, that says that it has struck, and which checkpoints there were.
    """

    point: str
    step: int | None
    rank: int | None
    victim: str
    how: str
    fired: str

    def strike(self) -> None:
        """Strike, if it has not yet."""
        try:
            descriptor = os.open(self.fired, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        there = sorted(int(path.name[5:]) for path in Path(self.fired).parent.glob("run/checkpoints/step_*"))
        os.write(descriptor, json.dumps({"pid": os.getpid(), "steps": there}).encode())
        os.close(descriptor)
        if self.how == "clock":
            real = time.time
            time.time = lambda: real() - 86400
        elif self.how == "full":
            raise OSError(28, "No space left on device")
        else:
            _send(_victim(self.victim), self.how)


def from_environment() -> Fault | None:
    """The fault that the harness left in the environment."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Fault(**json.loads(text))


def to_environment(fault: Fault) -> dict[str, str]:
    """The opposite."""
    return {VARIABLE: json.dumps(asdict(fault))}


def install(fault: Fault) -> None:
    """Lie in wait in this process."""
    if fault.point.startswith("save: "):
        _on_save(fault, fault.point.removeprefix("save: "))
    elif fault.point.startswith("store: "):
        _on_rename(fault, lambda source, target: f"/store/{fault.point.removeprefix('store: ')}/" in target, before=True)
    elif fault.point.startswith("files: ") or fault.point == "commits":
        numbers = count()

        def met(point: str) -> None:
            if point == fault.point and next(numbers) == (fault.step or 0):
                fault.strike()

        _on_writes(met)
    else:
        _on_phase(fault)


def tell_writes(path: str) -> None:
    """Append each `files: …` and `commits` that this process meets to a file, behind its pid."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    _on_writes(lambda point: os.write(descriptor, f"{os.getpid()} {point}\n".encode()))


def _on_writes(met: Callable[[str], object]) -> None:
    def traced(statement: str) -> None:
        if statement == "COMMIT":
            met("commits")

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.mkdir") or (event == "open" and (arguments[2] or 0) & WRITING):
            match = re.search(r"/store/(\w+)/", str(arguments[0]))
            if match:
                met(f"files: {match[1]}")

    def connected(database: Any, *positional: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(database, *positional, **named)
        if "mlflow.db" in str(database):
            connection.set_trace_callback(traced)
        return connection

    connect = sqlite3.connect
    sqlite3.connect = sqlite3.dbapi2.connect = connected  # type: ignore[assignment]
    sys.addaudithook(heard)


def _on_phase(fault: Fault) -> None:
    from rl_core import stall

    enter = stall.enter

    def wrapped(phase: str, step: int | None = None) -> None:
        enter(phase, step)
        if phase == fault.point and (fault.step is None or step == fault.step):
            fault.strike()

    stall.enter = wrapped


def _on_save(fault: Fault, point: str) -> None:
    final = f"step_{fault.step:06d}"  # which is in the name of its scratch directory too
    if point in ("shard", "index"):
        fsync, ending = os.fsync, {"shard": ".distcp", "index": ".metadata.tmp"}[point]

        def wrapped(descriptor: int) -> None:
            fsync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if final in path and path.endswith((ending, ending.removesuffix(".tmp"))):
                fault.strike()

        os.fsync = wrapped
    elif point in ("state", "manifest"):
        write, name = pathlib.Path.write_text, f"{point}.json"

        def written(self: Path, *args: Any, **kwargs: Any) -> int:
            if self.name == name and final in str(self):
                fault.strike()
            return write(self, *args, **kwargs)

        pathlib.Path.write_text = written  # type: ignore[method-assign]
    elif point == "rotation":
        _on_rename(fault, lambda source, target: "/step_" in source and target.endswith(".partial"), before=False)
    else:
        # Into it, too: nothing does so but one of the mutants.
        _on_rename(fault, lambda _, target: f"{target}/".rfind(f"/{final}/") > 0, before=point == "before rename")


def _on_rename(fault: Fault, meant: Callable[[str, str], bool], before: bool) -> None:
    rename = os.rename

    def wrapped(source: Any, target: Any, **more: Any) -> None:
        if before and meant(str(source), str(target)):
            fault.strike()
        rename(source, target, **more)
        if not before and meant(str(source), str(target)):
            fault.strike()

    os.rename = wrapped


def _victim(name: str) -> int:
    if name == "self":
        return os.getpid()
    agent = os.getppid()
    if name == "agent":
        return agent
    if name == "flow":
        return int(Path(f"/proc/{agent}/stat").read_text().rsplit(")", 1)[1].split()[1])
    others = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split() if int(pid) != os.getpid()]
    return others[0] if others else os.getpid()


def _send(pid: int, how: str) -> None:
    if how == "STOP":  # whoever lets it go on must not be stopped with it
        wake = f"sleep {STOPPED_SECONDS}; kill -CONT {pid}"
        subprocess.Popen(
            ["/bin/sh", "-c", wake], start_new_session=True, stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]}
        )
    os.kill(pid, getattr(signal, f"SIG{how}"))


def lie_in_wait() -> None:
    """What `sitecustomize` calls in each Python process of a case."""
    fault = from_environment()
    if fault is None:
        return
    words = " ".join(sys.orig_argv)
    flow = "flows.cli" in words
    rank = re.search(r"rl_core\.(train|evaluate)\b", words) is not None and "tasks.agent" not in words
    if fault.how == "tell" and (flow or rank):
        tell_writes(fault.fired)
    elif flow if fault.rank is None else rank and os.environ.get("RANK") == str(fault.rank):
        install(fault)
