"""Runs a case – a training that is struck, and goes on – and says what is wrong afterwards."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import forked, hook
from tests.faults.cases import ASKS, Case
from tests.faults.world import RANKS, STEPS, World, differences, not_whole, same_draws, steps_of


@dataclass
class Outcome:
    """What came of a case; it is well where `wrong` is empty."""

    case: Case
    fired: bool
    code: int | None
    resumed_from: int | None
    """None: the struck run had done everything, and nothing went on."""
    wrong: list[str] = field(default_factory=list)
    """Each begins with `orphan`, `lost`, `corrupt`, `different`, `exit code`, `hang` or `resume`."""
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def strike(world: World, case: Case, directory: Path, mutate: Callable[[], None] = lambda: None) -> Outcome:
    """Run the case in `directory`, which is made anew. `mutate` is called in each rank."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    run, log = directory / "run", directory / "log"
    fired = directory / "fired"
    fault = hook.Fault(case.point, case.step, case.rank, case.victim, case.how, str(fired))

    def in_rank(rank: int) -> None:
        if rank == case.rank:
            hook.install(fault)
        mutate()

    struck = forked.train(world.arguments(run), RANKS, log, in_rank)
    outcome = Outcome(case, fired.exists(), struck.code, None, seconds=struck.seconds)
    say = outcome.wrong.append
    _judge_end(case, struck, say)
    for problem in not_whole(run):
        say(f"corrupt: {problem}")
    there = json.loads(fired.read_text())["steps"] if fired.exists() else []
    committed = steps_of(run)
    for step in there[-2:]:
        if step not in committed and not {step + 1, step + 2} <= set(committed):
            say(f"lost: step {step} was committed when the fault struck")
    if struck.code == 0:
        _compare(case, run, world, say, RANKS)
        return outcome

    again = forked.train(world.arguments(run), case.ranks, log, lambda rank: mutate())
    outcome.seconds += again.seconds
    _judge_end(None, again, say)
    match = re.search(r"Going on from step_0*(\d+)", again.log)
    outcome.resumed_from = int(match[1]) if match else 0
    newest = max(committed, default=0)
    if again.code == 0 and outcome.resumed_from != newest:
        say(f"resume: it went on from step {outcome.resumed_from}, and step {newest} was committed")
    if again.code == 0:
        _compare(case, run, world, say, case.ranks)
    if list((run / "checkpoints").glob(".*")):
        say(f"leaving: {[path.name for path in (run / 'checkpoints').glob('.*')]}")
    return outcome


def _judge_end(case: Case | None, ended: forked.Ended, say: Callable[[str], None]) -> None:
    allowed: tuple[int | None, ...] = (0,)
    if case is not None and case.how == "KILL":
        allowed = (-9,) if case.victim == "agent" else (1,)
    elif case is not None and case.how in ASKS:
        allowed = (75, 0)
    elif case is not None and case.how == "full":
        allowed = (0,) if case.point == "save: rotation" else (2,)  # there it is committed already
    if ended.code is None:
        say("hang: the ranks did not end")
    elif ended.code not in allowed:
        say(f"exit code: {ended.code}, not {allowed}: {' | '.join(ended.log.splitlines()[-3:])}")
    if case is not None and case.how == "full" and "No space left on device" not in ended.log:
        say("exit code: the user is not told that the disk is full")
    for orphan in ended.orphans:
        say(f"orphan: {orphan}")


def _compare(case: Case, run: Path, world: World, say: Callable[[str], None], ranks: int) -> None:
    for problem in not_whole(run):
        say(f"corrupt: {problem}")
    if steps_of(run) != [STEPS - 1, STEPS]:
        say(f"lost: {steps_of(run)} are kept at the end")
    found = differences(run, world.whole) if ranks == RANKS else same_draws(run, world.whole)
    for difference in found:
        say(f"different: {difference}")
