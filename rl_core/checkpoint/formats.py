"""Checkpoints of other releases: older ones are brought up to date as they are read, newer ones are refused.

The format is a number in state.json (missing in the first release: 1). Whoever changes what a checkpoint holds, or under which
names, raises `FORMAT` and adds to `UPGRADES` how the state before it becomes the state now.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core import artifacts
from rl_core.errors import StoreError

FORMAT = 1
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From a format to the next one."""


def upgraded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """The state of a checkpoint as this release has it.

    Raises:
        StoreError: a newer release made it.
    """
    state = dict(state)
    found = state.pop("format", 1)
    _refuse_newer(path, found, FORMAT)
    for old in range(found, FORMAT):
        state = UPGRADES[old](state)
    return state


def refuse_other_format(path: Path) -> None:
    """Raises StoreError where a manifest or a state is of a newer release: it is whole, and must not be taken for broken.

    What cannot be read is left to those who tell whole from broken.
    """
    for name, known in ((artifacts.MANIFEST, artifacts.FORMAT), ("state.json", FORMAT)):
        try:
            found = json.loads((path / name).read_text(encoding="utf-8"))["format"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(found, int):
            _refuse_newer(path, found, known)


def _refuse_newer(path: Path, found: int, known: int) -> None:
    if found > known:
        raise StoreError(
            f"{path} has format {found}, and this release of ppoflow reads up to {known}: a newer one made it. Go on with that "
            "one, or start over with ppoflow run --fresh (by hand: another --output_dir)."
        )
