"""`ppoflow status`."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rl_core.errors import EXIT_USER

if TYPE_CHECKING:
    from rich.console import Console

    from tasks.status import RunStatus

BARS = "▁▂▃▄▅▆▇█"
CURVE = 30
"""Steps in the small curve."""


def status(run: str | None = None, /, *, as_json: Annotated[bool, Parameter("--json", negative=())] = False) -> None:
    """Say of each training under PPOFLOW_HOME whether it runs, how far it is, its reward and speed, its last checkpoint.

    Neither Prefect nor MLflow is asked. Exit code 0; 2 if there is no such run, or if RUN names trainings of which one has
    stopped before its last step.

    Parameters
    ----------
    run
        The beginning of a run's key, its registry.name, or a run directory; all runs if left out.
    as_json
        Print one JSON document instead.
    """
    import json
    from dataclasses import asdict

    from tasks.status import find_runs, stages

    found, making = find_runs(run), stages() if run is None else []
    if as_json:
        print(json.dumps({"runs": [asdict(one) for one in found], "stages": making}, indent=1))
    else:
        _print(found, making)
    if run is not None and any(one.state == "stopped" for one in found):
        raise SystemExit(EXIT_USER)


def _print(found: "list[RunStatus]", making: list[dict[str, str]]) -> None:
    from rich.console import Console

    from rl_core.home import home

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not found:
        console.print(f"No training has begun under {home() / 'runs'}.")
    for number, one in enumerate(found):
        _print_run(console, one, first=number == 0)
    for stage in making:
        console.print(f"being made: {stage['stage']} {stage['key'][:8]} by {stage['holder']}")


def _print_run(console: "Console", run: "RunStatus", first: bool) -> None:
    from rich.text import Text

    colour = {"running": "green", "stopped": "yellow", "finished": "blue"}[run.state]
    asked = "?" if run.steps is None else str(run.steps)
    who = f" by {run.holder}" if run.holder else ""
    if not first:
        console.print()
    console.print(Text.assemble((f"{run.name} {run.key[:8]}  ", "bold"), (run.state, colour), f"{who}  step {run.step}/{asked}"))
    lines: dict[str, list[str | None]] = {
        "reward": [_reward(run)],
        "speed": [_speed(run), f"about {_time(run.left_s)} left" if run.left_s is not None else None],
        "checkpoint": [_checkpoint(run), f"{_bytes(run.bytes)} on disk"],
        "last step": [f"{_time(run.last_step_age_s)} ago" if run.last_step_age_s is not None else None],
        "directory": [run.path],
    }
    for name, parts in lines.items():
        if said := ", ".join(part for part in parts if part):
            console.print(f"  {name:<10} {said}")


def _reward(run: "RunStatus") -> str | None:
    if run.reward is None:
        return None
    from tasks.status import WINDOW

    change = "" if run.reward_change is None else f" ({run.reward_change:+.3f} in {WINDOW} steps)"
    return f"{run.reward:.3f}{change} {curve(run.rewards[-CURVE:])}"


def _speed(run: "RunStatus") -> str | None:
    if run.s_per_step is None:
        return None
    tokens = "" if run.tokens_per_s is None else f", {run.tokens_per_s:.0f} tokens/s"
    return f"{run.s_per_step:.1f} s/step{tokens}"


def _checkpoint(run: "RunStatus") -> str:
    if run.checkpoint is None:
        return "none"
    return f"step {run.checkpoint.step}, {_time(run.checkpoint.age_s)} old"


def curve(values: list[float]) -> str:
    """A line of bars, the lowest value as the lowest bar."""
    lowest, span = min(values), max(values) - min(values)
    return "".join(BARS[round((value - lowest) / span * (len(BARS) - 1)) if span else 0] for value in values)


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
