"""`ppoflow samples`."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number


def samples(
    run: str | None = None,
    /,
    *,
    step: int | None = None,
    last: Annotated[int, Parameter(validator=Number(gte=1))] = 1,
    sort: Literal["step", "reward"] = "step",
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> None:
    """Show prompts, responses and their rewards that a training has written down as it went.

    Exit code 0; 2 if there is no such run or step, or nothing was written yet.

    Parameters
    ----------
    run
        The beginning of a run's key, its registry.name, or a run directory; the newest run if left out.
    step
        Only this step, counted from 0 as in the log.
    last
        The last so many steps.
    sort
        By step, or by reward: the best first.
    as_json
        Print one JSON document instead.
    """
    import json

    from rl_core.errors import ConfigError
    from rl_core.home import home
    from tasks.status import find_runs

    found = find_runs(run)
    if not found:
        raise ConfigError(f"RUN: no training has begun under {home() / 'runs'}. Start one with ppoflow run.")
    chosen = found[0]
    rows = _chosen(chosen.path, step, last)
    if not rows:
        what = f"of step {step} " if step is not None else ""
        raise ConfigError(
            f"--step: no samples {what}are in {chosen.path}/samples.jsonl; its training has {chosen.step} steps (from 0 on)."
        )
    if sort == "reward":
        rows.sort(key=lambda row: -row["reward"])
    if as_json:
        print(json.dumps({"run": chosen.key, "name": chosen.name, "samples": rows}, indent=1, ensure_ascii=False))
        return
    _print(chosen.name, chosen.key, rows)


def _chosen(directory: str, step: int | None, last: int) -> list[dict[str, Any]]:
    from pathlib import Path

    from tasks.lines import rows

    path = Path(directory) / "samples.jsonl"
    if step is not None:
        return [row for row in rows(path) if row["step"] == step]
    kept: dict[int, list[dict[str, Any]]] = {}
    for row in rows(path):
        kept.setdefault(row["step"], []).append(row)
        if len(kept) > last:
            del kept[min(kept)]
    return [row for rows_ in kept.values() for row in rows_]


def _print(name: str, key: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.rule import Rule

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{name} {key[:8]}", style="bold")
    for row in rows:
        console.print(Rule(f"step {row['step']}, sample {row['sample']}, reward {row['reward']:.4g}", align="left"))
        console.print(visible(row["prompt"]), style="dim")
        console.print(visible(row["response"]) or "(empty response)")
        if row.get("ground_truth") is not None:
            console.print(f"ground truth: {visible(str(row['ground_truth']))}", style="green")


def visible(text: str) -> str:
    """What a model wrote, without the power over the terminal that control characters have."""
    return "".join(char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text)
