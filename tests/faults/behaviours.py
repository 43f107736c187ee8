"""What misbehaves without dying: rewards that hang or raise, numbers that are not finite. The configuration says what follows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import forked
from tests.faults.world import RANKS, World, not_whole, steps_of

HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if int(ground_truth) % 3 == 0 and len(solution_str) < 5:  # not when it is tried out, and not all of a step
        time.sleep(600)
    return 0.5
"""
RAISES = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if int(ground_truth) % 3 == 0 and len(solution_str) < 5:
        raise ValueError("what is this?")
    return 0.5
"""


def nan_gradients() -> None:
    """From the second step on every loss is NaN."""
    from rl_core import stall
    from rl_core.learner import Learner

    backward = Learner.backward

    def poisoned(self: Learner, loss: Any, last: bool) -> None:
        backward(self, loss * float("nan") if (stall._stay.step or 0) >= 1 else loss, last)

    Learner.backward = poisoned  # type: ignore[method-assign]


def nan_logits() -> None:
    """The weights that the rollout of the second step works with hold a NaN."""
    from rl_core import phases

    generate = phases.generate

    def poisoned(engine: Any, *args: Any, step: int, **more: Any) -> Any:
        if step == 1:
            next(engine.model.parameters()).data.fill_(float("nan"))
        return generate(engine, *args, step=step, **more)

    phases.generate = poisoned


@dataclass(frozen=True)
class Behaviour:
    """What is done, and what must follow."""

    code: int
    said: str
    """In the log, or (`metric>0`) a metric of some step."""
    reward: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    in_rank: Callable[[], None] = lambda: None
    committed: bool | None = True
    """Whether steps before it are kept; None: there may be none before it."""


LIMIT = {"reward.timeout_s": 2}
BEHAVIOURS = {
    "a reward that hangs ends the run": Behaviour(2, "reward", HANGS, LIMIT | {"reward.on_error": "raise"}, committed=None),
    "a reward that hangs is worth the error value": Behaviour(
        0, "reward/failed", HANGS, {"reward.timeout_s": 1, "reward.on_error": "value", "trainer.max_steps": 1}
    ),
    "a reward that raises ends the run": Behaviour(
        2, "what is this?", RAISES, {"reward.timeout_s": None, "reward.on_error": "raise"}, committed=None
    ),
    "a reward that raises is worth the error value": Behaviour(
        0, "reward/failed", RAISES, {"reward.timeout_s": None, "reward.on_error": "value"}
    ),
    "gradients that are not finite are not applied, three in a row end the run": Behaviour(
        2, "were not finite 3 times in a row", in_rank=nan_gradients
    ),
    "logits that are not finite end the run before anything is drawn": Behaviour(2, "finite", in_rank=nan_logits),
}


def misbehave(world: World, name: str, directory: Path) -> list[str]:
    """Run one; says what is not as it must be."""
    behaviour = BEHAVIOURS[name]
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    settings = dict(behaviour.settings)
    if behaviour.reward:
        (directory / "reward.py").write_text(behaviour.reward)
        settings["reward.path"] = str(directory / "reward.py")
    run = directory / "run"
    ended = forked.train(world.arguments(run, **settings), RANKS, directory / "log", lambda rank: behaviour.in_rank())
    wrong = [f"orphan: {orphan}" for orphan in ended.orphans] + [f"corrupt: {problem}" for problem in not_whole(run)]
    if ended.code != behaviour.code:
        wrong.append(f"exit code {ended.code}: {ended.log[-600:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] if ended.code == 0 else []
    told = any(value > 0 for row in rows for key, value in row.items() if key.startswith(behaviour.said))
    if not (told if rows else behaviour.said in ended.log):
        wrong.append(f"nobody is told: {behaviour.said}; {ended.log[-600:]}")
    if behaviour.committed is not None and bool(steps_of(run)) != behaviour.committed:
        wrong.append(f"committed are the steps {steps_of(run)}")
    return wrong
