"""How a run is reported: one row a stage, as the table at its end and as JSON."""

import time
from collections.abc import Callable
from typing import Any

from rl_core.home import home
from tasks.store import Key, Reference


class Stages:
    """Calls the stages' tasks and notes what each did and how long it took."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.since = time.monotonic()

    def run(self, task: Callable[..., Reference], key: Key, *arguments: Any, fresh: bool) -> Reference:
        """The artifact of `key`, by the stage's task."""
        reference = task(key, *arguments, fresh=fresh)
        row = self.note(key.stage, reference.state, reference.key, str(reference.path))
        if reference.resumed_from_step is not None:
            row["resumed_from_step"] = reference.resumed_from_step
        return reference

    def note(self, name: str, state: str, key: str, artifact: str) -> dict[str, Any]:
        """Add the row of a stage that has just ended; its time counts from the end of the one before."""
        now = time.monotonic()
        row = {"name": name, "state": state, "seconds": round(now - self.since, 3), "key": key, "artifact": artifact}
        self.rows.append(row)
        self.since = now
        return row


def evaluation_summary(report: dict[str, Any]) -> dict[str, Any]:
    """An evaluation's report without the reward of each prompt."""
    return {
        name: {metric: value for metric, value in result.items() if metric != "rewards"}
        for name in ("base", "champion", "policy")
        if (result := report.get(name)) is not None
    }


def print_report(report: dict[str, Any]) -> None:
    """The table of stages, how the models did, what was registered, and where to look."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("stage", "state", "seconds", "artifact")
    for row in report["stages"]:
        state = row["state"] + (f" from step {row['resumed_from_step']}" if "resumed_from_step" in row else "")
        table.add_row(row["name"], state, f"{row['seconds']:.1f}", _short(row["artifact"]))
    console.print(table)
    for name, result in report["evaluation"].items():
        console.print(f"{name:>8}: {_result_line(result)}")
    registered = report["registered"]
    aliases = ", ".join(registered["aliases"]) or "none"
    console.print(f"registered: {registered['name']} version {registered['version']} (aliases: {aliases})")
    artifacts = {row["name"]: row["artifact"] for row in report["stages"]}
    console.print(f"policy: {artifacts['train_policy']}")
    console.print(f"learning curve: {artifacts['evaluate_policy']}/learning_curve.png")


def _result_line(result: dict[str, Any]) -> str:
    reward, accuracy = result["reward"], result["accuracy"]
    return (
        f"reward {reward['mean']:.3f} [{reward['ci95'][0]:.3f}, {reward['ci95'][1]:.3f}], accuracy {accuracy['mean']:.1%}, "
        f"KL {result['kl']['mean']:.4f}, {result['response_length']['mean']:.1f} tokens a response, {result['prompts']} prompts"
    )


def _short(artifact: str) -> str:
    """Relative to the home, its key cut to twelve digits."""
    relative = artifact.removeprefix(f"{home()}/")
    head, _, key = relative.rpartition("/")
    return f"{head}/{key[:12]}…" if len(key) == 64 else relative
