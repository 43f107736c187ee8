"""`ppoflow store ls` and `ppoflow store gc`."""

import re
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from tasks.store_contents import Item

store = App(name="store", help="Look at the artifacts and the trainings under PPOFLOW_HOME, and delete those that nothing needs.")

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
Json = Annotated[bool, Parameter("--json", negative=())]


@store.command
def ls(*, as_json: Json = False) -> None:
    """List artifacts, trainings and leavings: what, state, size, when last used, and who needs it.

    Files are not verified (`ppoflow verify` does). An artifact is needed by registered versions, by trainings that are not
    finished, and by processes that use it now. Exit code 0.

    Parameters
    ----------
    as_json
        Print one JSON document instead.
    """
    import json

    from tasks.mlflow_registry import RegistryError
    from tasks.store_contents import artifacts, leavings, run_directories, size
    from tasks.store_references import references, registered

    unknown = None
    try:
        versions = registered()
    except RegistryError as error:
        versions, unknown = [], str(error)
    stored, runs = artifacts(), run_directories()
    needed = references(stored, runs, versions)
    items = [*stored, *runs, *leavings()]
    total = size(item.path for item in items)
    if as_json:
        rows = [_row(item) | {"needed_by": needed.get(item.name, [])} for item in items]
        print(json.dumps({"items": rows, "bytes": total, "registry_error": unknown}, indent=1))
        return
    _print(items, [", ".join(needed.get(item.name, [])) for item in items], "needed by")
    print(f"{_size(total)} in all; what has several names counts once")
    if unknown is not None:
        print(f"Which registered versions need something is not known: {unknown}")


@store.command
def gc(*, older_than: str = "30d", dry_run: bool = False, as_json: Json = False) -> None:
    """Delete what nothing needs, also while flows run.

    At once: what dead writers left, and what was set aside because it was broken. If not used for a time: artifacts that no
    registered version, no unfinished training and no living process needs, and finished trainings of which no policy is
    registered. An unfinished training stays; delete its directory to give it up. Exit code 0; 1 if MLflow does not answer.

    Parameters
    ----------
    older_than
        That time: a number and s, m, h or d.
    dry_run
        Only say what would be deleted.
    as_json
        Print one JSON document instead.
    """
    import json

    from tasks.environment import prepare
    from tasks.store_gc import collect

    seconds = _seconds(older_than)
    prepare()
    collected = collect(seconds, dry_run)
    if as_json:
        rows = [_row(item) for item in collected.items]
        print(json.dumps({"deleted": rows, "freed_bytes": collected.freed, "dry_run": dry_run}, indent=1))
        return
    if collected.items:
        _print(collected.items)
    what = f"{len(collected.items)} would be deleted" if dry_run else f"{len(collected.items)} deleted"
    print(f"{what}, {_size(collected.freed)} freed")


def _seconds(text: str) -> float:
    from rl_core.errors import ConfigError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"--older-than: {text!r} is no time. Write a number and s, m, h or d, such as 30d or 12h.")
    return float(match[1]) * UNITS[match[2]]


def _row(item: "Item") -> dict[str, Any]:
    names = ("stage", "key", "state", "bytes", "idle_s", "digest")
    return {name: getattr(item, name) for name in names} | {"path": str(item.path)}


def _print(items: "list[Item]", last: list[str] | None = None, heading: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "key", "state", "size", "last used", *([heading] if last else []), box=None, pad_edge=False)
    table.columns[3].justify = "right"
    for number, item in enumerate(items):
        cells = [item.stage, item.key[:8], item.state, _size(item.bytes), f"{_time(item.idle_s)} ago"]
        table.add_row(*cells, *([last[number]] if last else []))
    Console(highlight=False, markup=False, soft_wrap=True).print(table)


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
