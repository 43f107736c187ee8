"""Which fault strikes where, drawn from a seed: the same seed, the same cases."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.hook import PHASES, SAVE_POINTS
from tests.faults.world import RANKS, STEPS

ONCE = ("building the models", "exporting the policy")
ASKS = ("TERM", "USR1")
"""Ends the run in good order: exit code 75, or 0 where it comes too late."""
OF_RANK_0 = ("index", "state", "manifest", "before rename", "after rename", "rotation")
"""What of a save only the first rank does."""


@dataclass(frozen=True)
class Case:
    """A run that is struck once, and goes on."""

    number: int
    point: str
    step: int | None
    rank: int
    victim: str
    how: str
    ranks: int = RANKS
    """With which it goes on."""

    @property
    def kind(self) -> str:
        """For the report."""
        return self.point

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        on = "" if self.ranks == RANKS else f", going on on {self.ranks} rank(s)"
        return f"{self.number}: {self.how} to {self.victim} as rank {self.rank} is in {self.point}{step}{on}"


def cases(count: int, seed: int) -> Iterator[Case]:
    """So many, each point about as often as the others."""
    points = [*ONCE, *PHASES, *(f"save: {point}" for point in SAVE_POINTS)]
    draw, bag = random.Random(seed), list[str]()
    for number in range(count):
        if not bag:
            bag = draw.sample(points, len(points))
        yield _case(number, bag.pop(), draw)


def _case(number: int, point: str, draw: random.Random) -> Case:
    rank = draw.randrange(RANKS)
    step: int | None = draw.randrange(STEPS)
    if point.startswith("save: "):
        name = point.removeprefix("save: ")
        rank = 0 if name in OF_RANK_0 else rank
        step = STEPS if name == "rotation" else draw.randint(1, STEPS)
    elif point in ONCE:
        rank, step = 0, None
    how = draw.choices(["KILL", "TERM", "USR1", "STOP", "clock", "full"], [10, 3, 1, 2, 1, 2])[0]
    if how == "full" and not point.startswith("save: "):
        how = "KILL"
    victim = draw.choice(["self", "other", "agent"]) if how in ("KILL", "TERM", "STOP") else "self"
    return Case(number, point, step, rank, victim, how, draw.choices([RANKS, 1, 3], [8, 1, 1])[0])
