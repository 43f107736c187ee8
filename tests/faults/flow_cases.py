"""Which fault strikes a whole flow where, drawn from a seed: each stage as often as the others."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.faults.hook import PHASES

STAGES = ("tokenize_dataset", "convert_checkpoint", "train_policy", "evaluate_policy", "register_policy")
STEPS = 2
IN_EVALUATION = ("building the model", "answering", "judging the answers", "measuring the KL")
"""Phases of a rank that evaluates."""


@dataclass(frozen=True)
class FlowCase:
    """A flow of which a process is struck once as `stage` is under way, and that is started again."""

    number: int
    stage: str
    point: str
    step: int | None
    rank: int | None
    victim: str
    how: str

    def __str__(self) -> str:
        which = "" if self.step is None else f", {self.step}"
        return f"{self.number}: {self.stage}: {self.how} to {self.victim} at {self.point}{which}"


def flow_cases(count: int, seed: int, writes: Mapping[str, int]) -> Iterator[FlowCase]:
    """So many.

    Args:
        writes: how often a flow that nothing strikes meets each `files: …` and `commits`.
    """
    draw, faults = random.Random(seed), Counter[str]()
    for number in range(count):
        stage = STAGES[number % len(STAGES)]
        point, step = _point(stage, draw, writes)
        rank = 0 if point in (*PHASES, *IN_EVALUATION) else None
        hows = ("KILL", "TERM", "STOP", "clock")
        how = min(hows, key=lambda how: (faults[f"{stage} {how}"] / (4, 3, 2, 1)[hows.index(how)], how))
        faults[f"{stage} {how}"] += 1
        victim = "self" if rank is None or how == "clock" else draw.choice(["self", "agent", "flow"])
        yield FlowCase(number, stage, point, step, rank, victim, how)


def _point(stage: str, draw: random.Random, writes: Mapping[str, int]) -> tuple[str, int | None]:
    if stage == "train_policy":
        point = draw.choice([*PHASES, "store: train_policy", "files: train_policy"])
        if point in PHASES:
            return point, draw.randrange(STEPS)
    elif stage == "evaluate_policy":
        point = draw.choice([*IN_EVALUATION, "files: evaluate_policy", "files: evaluate_model"])
    else:
        point = "commits" if stage == "register_policy" else f"files: {stage}"
    return point, draw.randrange(writes[point]) if point in writes else None
