"""How a run is reported: one row a stage, as the table at its end and as JSON."""

import json
import os
import time
from types import ModuleType
from typing import Any

from prefect import Task

from rl_core.config import Config
from rl_core.home import home
from tasks.register_policy import Registered
from tasks.store import Key, Reference


class Stages:
    """Calls the stages' tasks one after the other and notes what each did and how long it took.

    Args:
        fresh: make every artifact again.
    """

    def __init__(self, fresh: bool) -> None:
        self.fresh = fresh
        self.rows: list[dict[str, Any]] = []
        self.since = time.monotonic()

    def run(self, stage: ModuleType, config: Config, *inputs: Any) -> Reference:
        """The artifact of a stage: `stage.key` names it, the task of the stage's name makes or finds it."""
        key: Key = stage.key(config, *inputs)
        task: Task[..., Reference] = getattr(stage, key.stage)
        if self.fresh or key.replacing:
            task = task.with_options(refresh_cache=True)
        reference = task(key, config, *inputs, fresh=self.fresh)
        row = self._note(key.stage, reference.state, reference.key, str(reference.path))
        if reference.resumed_from_step is not None:
            row["resumed_from_step"] = reference.resumed_from_step
        return reference

    def register(self, task: Task[..., Registered], config: Config, *inputs: Reference) -> Registered:
        """The registered version; this stage has no artifact of its own."""
        registered = task(config, *inputs)
        state = "computed" if registered.created else "reused"
        self._note(task.name, state, registered.digest, f"models:/{registered.name}/{registered.version}")
        return registered

    def report(self, evaluation: Reference, registered: Registered) -> dict[str, Any]:
        """The whole run as JSON values."""
        return {
            "stages": self.rows,
            "evaluation": _summary(json.loads((evaluation.path / "report.json").read_text(encoding="utf-8"))),
            "registered": {"name": registered.name, "version": registered.version, "aliases": registered.aliases},
        }

    def _note(self, name: str, state: str, key: str, artifact: str) -> dict[str, Any]:
        """Add the row of a stage that has just ended; its time counts from the end of the one before."""
        now = time.monotonic()
        row = {"name": name, "state": state, "seconds": round(now - self.since, 3), "key": key, "artifact": artifact}
        self.rows.append(row)
        self.since = now
        return row


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    """An evaluation's report without the reward of each prompt; only the models that there are."""
    return {
        name: {metric: value for metric, value in report[name].items() if metric != "rewards"}
        for name in ("base", "champion", "policy")
        if report.get(name) is not None
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
    tracking = os.environ["MLFLOW_TRACKING_URI"]
    alias = "champion" if "champion" in registered["aliases"] else "candidate"
    console.print(f"to serve it: MLFLOW_TRACKING_URI={tracking} and models:/{registered['name']}@{alias}")


def _result_line(result: dict[str, Any]) -> str:
    reward, accuracy = result["reward"], result["accuracy"]
    return (
        f"reward {reward['mean']:.3f} [{reward['ci95'][0]:.3f}, {reward['ci95'][1]:.3f}], accuracy {accuracy['mean']:.1%}, "
        f"KL {result['kl']['mean']:.4f}, {result['response_length']['mean']:.1f} tokens a response, {result['prompts']} prompts"
    )


def _short(artifact: str) -> str:
    """Relative to the home, its key cut to eight digits."""
    relative = artifact.removeprefix(f"{home()}/")
    head, _, key = relative.rpartition("/")
    return f"{head}/{key[:8]}…" if len(key) == 64 else relative
