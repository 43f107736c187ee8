"""`ppoflow doctor`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from rl_core.errors import EXIT_USER

if TYPE_CHECKING:
    from rl_core.tools.doctor import Check

WORDS = {"pass": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red"), "skip": ("-", "dim")}
"""How a state is shown, and in which style."""


def doctor(
    config: Path | None = None,
    /,
    *,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)] = None,
    port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> None:
    """Look whether this machine can run ppoflow, and with a configuration, whether it has what that needs.

    Each check says what it found; what is wrong has a remedy. Exit code 0; 2 if a check failed (warnings do not count).

    Parameters
    ----------
    config
        YAML file, such as those in configs/; left out, only the machine is looked at.
    overrides
        key=value, e.g. launch.device=cpu; may be given several times.
    port
        Where two processes try to meet, as the ranks of a torchrun would; default: MASTER_PORT, else torchrun's 29500. 0 takes a
        free one.
    as_json
        Print one JSON document instead.
    """
    import json
    from dataclasses import asdict

    from tasks.doctor import examine

    checks: list[Check] = []
    for check in examine(config, overrides or [], _port() if port is None else port):
        checks.append(check)
        if not as_json:
            _print(check)
    counts = {state: sum(check.state == state for check in checks) for state in ("fail", "warn", "pass", "skip")}
    ok = not counts["fail"]
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=1, ensure_ascii=False))
    else:
        words = {"fail": "failed", "warn": "warning(s)", "pass": "passed", "skip": "not tried"}
        print(f"\n{', '.join(f'{count} {words[state]}' for state, count in counts.items() if count)}.")
    if not ok:
        raise SystemExit(EXIT_USER)


def _port() -> int:
    from rl_core.tools.doctor_ranks import PORT

    stated = os.environ.get("MASTER_PORT", "")
    return int(stated) if stated.isdigit() else PORT


def _print(check: "Check") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, soft_wrap=True)
    word, style = WORDS[check.state]
    console.print(Text.assemble((f"{word:<5}", style), f"{check.name:<14}{check.found}"))
    if check.remedy:
        console.print(f"{'':<19}→ {check.remedy}")
