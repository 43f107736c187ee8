"""Who needs which artifacts of the store: registered versions, runs that are not finished, and processes that live.

Whoever needs an artifact needs what it was made from: the components of its key name the inputs by key or digest. So a version
needs its policy, and through it the dataset and the base model; and its comparison, and through it the models' evaluations.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.home import home
from tasks.status import last_checkpoint
from tasks.store_contents import Item
from tasks.store_use import users

if TYPE_CHECKING:
    from tasks.mlflow_registry import Version

KEY_TAG = re.compile(r"ppoflow\.(\w+)\.key")
"""A version's lineage (`tasks.register_policy`)."""
References = dict[str, list[str]]
"""`<stage>/<key>` → who needs it."""


def registered() -> "list[tuple[Version, list[str]]]":
    """All registered versions with their aliases.

    Raises:
        RegistryError: MLflow does not answer.
    """
    from tasks.environment import prepare
    from tasks.mlflow_registry import registry

    prepare()
    with registry("tell which versions are registered") as client:
        from tasks.mlflow_versions import every_version

        return every_version(client)


def references(
    artifacts: Iterable[Item], runs: Iterable[Item], versions: "Iterable[tuple[Version, list[str]]]", forget_dead: bool = False
) -> References:
    """Who needs the artifacts and the runs.

    Args:
        versions: as `registered` gives them.
        forget_dead: see `tasks.store_use.users`.
    """
    from tasks.mlflow_registry import DIGEST

    named: dict[str, list[Item]] = {}
    for item in artifacts:
        for name in {item.name, item.key, item.digest} - {""}:
            named.setdefault(name, []).append(item)
    found: References = {}

    def need(name: str, who: str) -> None:
        for item in named.get(name, []):
            if who not in found.setdefault(item.name, []):
                found[item.name].append(who)
                for component in item.components.values():
                    if isinstance(component, str):
                        need(component, who)

    for version, aliases in versions:
        who = f"{version.name}/{version.number}" + "".join(f"@{alias}" for alias in aliases)
        for tag, value in version.tags.items():
            if match := KEY_TAG.fullmatch(tag):
                need(f"{match[1]}/{value}", who)
        need(version.tags[DIGEST], who)
        if run_key := version.tags.get("ppoflow.run_key"):
            found.setdefault(f"run/{run_key}", []).append(who)
    for run in runs:
        if run.state != "finished":
            for digest in _inputs(run.path):
                need(digest, f"run {run.key[:8]}")
    for name, holders in users(home() / "store", forget_dead).items():
        for holder in holders:
            need(name, holder)
    return found


def _inputs(run: Path) -> list[str]:
    """Digests of the dataset and the base model of a run that has a checkpoint."""
    checkpoint = last_checkpoint(run)
    if checkpoint is None:
        return []
    try:
        state = json.loads((run / "checkpoints" / f"step_{checkpoint.step:06d}" / "state.json").read_text(encoding="utf-8"))
        return [state["identity"]["dataset"], state["identity"]["base"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
