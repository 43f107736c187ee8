"""Where each rank is, and a report in the log when one stays too long in a phase: which, since when, and its Python stack.

Each rank notes its phase in a variable. A thread on each rank puts that into the ranks' store every few seconds, over a
connection of its own, so that it works while the main thread waits in a collective; the thread of rank 0 reads what all have
put there and prints. Nothing here is a collective, and nothing waits for another rank.
"""

import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl_core.config.trainer import LaunchConfig
from rl_core.preflight import listed

if TYPE_CHECKING:
    from rl_core.distributed import World

INTERVAL_SECONDS = 5.0
"""Between two looks, or a quarter of `launch.stall_report_s` where that is less."""
INNERMOST, FRAMES = 3, 10
"""A stack shows this many innermost frames whatever they are, and so many in all."""
ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
ENDED = "the end"


@dataclass(frozen=True)
class Stay:
    """A rank in a phase."""

    phase: str
    step: int | None
    number: int
    """Counts the stays of a rank: the same phase entered again is another one."""
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"


_stay = Stay("start", None, 0)


def enter(phase: str, step: int | None = None) -> None:
    """Note that this rank is in a phase (of a step) from now on."""
    global _stay
    _stay = Stay(phase, step, _stay.number + 1)


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """A phase that lasts for the block. It stays noted when the block raises: that is where the rank ended."""
    enter(name, step)
    yield
    enter(f"what follows {name}", step)


def where() -> str:
    """`rank 1 on node-b in update_actor of step 12`."""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} in {_stay}"


@contextmanager
def watch(world: "World", launch: LaunchConfig) -> Iterator[None]:
    """Report stalls while the block runs, if `launch.stall_report_s` says so."""
    if not launch.stall_report_s:
        yield
        return
    own = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined] # its own connection
    store = dist.PrefixStore("stall", own)
    ended = threading.Event()
    arguments = (store, world.rank, world.size, launch.stall_report_s, threading.get_ident(), ended)
    thread = threading.Thread(target=_look_after, args=arguments, daemon=True, name="stall")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=INTERVAL_SECONDS)  # a store that is gone may take longer: it is a daemon


@dataclass(frozen=True)
class Note:
    """What a rank puts into the store."""

    stay: str
    number: int
    seconds: float
    """How long the stay has lasted, by the rank's own clock."""
    host: str
    stack: str
    beat: int
    """Counts the notes of a rank."""


class Reporter:
    """What rank 0 has heard of the ranks and has reported."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._heard: dict[int, tuple[int, float]] = {}
        self._reported: dict[int, int] = {}

    def report(self, notes: Mapping[int, Note], now: float) -> str | None:
        """The report, if a rank has been in one phase for more than the limit and no report has named that stay yet.

        Args:
            notes: the last of each rank.
            now: seconds, by one clock for all calls.
        """
        silent = {}
        for rank, note in notes.items():
            if self._heard.get(rank, (None, 0.0))[0] != note.beat:
                self._heard[rank] = (note.beat, now)
            silent[rank] = now - self._heard[rank][1]
        present = [rank for rank in sorted(notes) if notes[rank].stay != ENDED]
        seconds = {rank: notes[rank].seconds + silent[rank] for rank in present}
        stalled = [rank for rank in present if seconds[rank] > self._limit]
        if all(self._reported.get(rank) == notes[rank].number for rank in stalled):
            return None
        self._reported = {rank: notes[rank].number for rank in present}  # whoever waits for a stalled rank stalls with it
        parts = []
        for stay, ranks in _alike(sorted(present, key=lambda rank: -seconds[rank]), lambda rank: notes[rank].stay):
            hosts = ", ".join(dict.fromkeys(notes[rank].host for rank in ranks))
            been = "has been" if len(ranks) == 1 else "have been"
            parts.append(f"{listed(ranks)} on {hosts} {been} in {stay} for {seconds[ranks[0]]:.0f} s")
        lines = ["ppoflow: stalled: " + "; ".join(parts)]
        lines += [f"  {listed(ranks)} at {stack}" for stack, ranks in _alike(stalled, lambda rank: notes[rank].stack)]
        if quiet := [rank for rank in stalled if silent[rank] > self._limit / 2]:
            lines.append(f"  {listed(quiet)} gave no sign of life for {silent[quiet[0]]:.0f} s: stopped, or busy outside Python")
        return "\n".join(lines)


def _look_after(store: dist.Store, rank: int, size: int, limit: float, main: int, ended: threading.Event) -> None:
    """The thread: note where this rank is; on rank 0 also look where all are."""
    reporter, known, beat = Reporter(limit), set[int](), 0
    try:
        while not ended.wait(min(INTERVAL_SECONDS, limit / 4)):
            stay, beat = _stay, beat + 1
            note = Note(str(stay), stay.number, time.monotonic() - stay.since, socket.gethostname(), _stack(main), beat)
            store.set(str(rank), json.dumps(asdict(note)))
            if rank == 0:
                known |= {other for other in range(size) if other not in known and store.check([str(other)])}  # get() would wait
                notes = {other: Note(**json.loads(store.get(str(other)))) for other in known}
                if (report := reporter.report(notes, time.monotonic())) is not None:
                    sys.stdout.write(report + "\n")
                    sys.stdout.flush()
        store.set(str(rank), json.dumps(asdict(Note(ENDED, 0, 0.0, "", "", 0))))
    except RuntimeError:
        return  # the store is gone, and with it whoever served it: torchrun ends the ranks


def _stack(thread: int) -> str:
    """Where a thread is, innermost first: of the libraries' frames only the innermost."""
    frame, shown = sys._current_frames().get(thread), list[str]()
    innermost = INNERMOST
    while frame is not None and len(shown) < FRAMES:
        path = Path(frame.f_code.co_filename)
        library = str(path).startswith(LIBRARIES)
        if innermost > 0 or not library:
            name = path.relative_to(ROOT) if not library and path.is_relative_to(ROOT) else Path(*path.parts[-2:])
            shown.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame, innermost = frame.f_back, innermost - 1
    return " < ".join(shown)


def _alike(ranks: Iterable[int], what: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    """The ranks grouped by what is said of them, in the order of their first."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(what(rank), []).append(rank)
    return list(groups.items())
