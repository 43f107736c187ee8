"""`ppoflow validate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rl_core.errors import EXIT_USER

if TYPE_CHECKING:
    from rl_core.config import Config


def validate(
    config: Path,
    /,
    *,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)] = None,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> None:
    """Try the models of a configuration: load, wrap, forward and gradient of each role, on the ranks of a training.

    Nothing is trained or kept. Exit code 0; 2 if a step failed.

    Parameters
    ----------
    config
        YAML file, such as those in configs/.
    overrides
        key=value, e.g. launch.nproc_per_node=1; may be given several times.
    as_json
        Print one JSON document instead.
    """
    import json
    import tempfile

    import yaml

    from rl_core.config import load_config
    from rl_core.errors import PpoflowError
    from rl_core.home import home, writable
    from tasks.devices import check_device
    from tasks.torchrun import run_ranks

    settings = load_config(config, overrides or ())
    check_device(settings.launch)
    settings = _with_model(settings)
    with tempfile.TemporaryDirectory() as directory:
        copy, report = Path(directory) / config.name, Path(directory) / "report.json"
        copy.write_text(yaml.safe_dump(settings.model_dump(mode="json")), encoding="utf-8")
        log = writable(home() / "logs") / "validate.log"
        log.unlink(missing_ok=True)
        try:
            run_ranks(
                "rl_core.tools.validate",
                [f"--config_path={copy}", f"--report={report}", f"--origin={config}"],
                launch=settings.launch,
                log_path=log,
            )
        except PpoflowError:  # the ranks say in their exit code that a step failed
            if not report.exists():
                raise
        found = json.loads(report.read_text(encoding="utf-8"))
    _print(found, as_json)
    if not found["ok"]:
        raise SystemExit(EXIT_USER)


def _with_model(settings: "Config") -> "Config":
    """With the files of a registered model for its name."""
    if not settings.model.name_or_path.startswith("models:/"):
        return settings
    from flows.inputs import model_source
    from tasks.environment import prepare

    prepare()
    model = settings.model.model_copy(update={"name_or_path": str(model_source(settings).directory)})
    return settings.model_copy(update={"model": model})


def _print(found: dict[str, Any], as_json: bool) -> None:
    import json

    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.text import Text

    from rl_core.tools.validate_report import Report

    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in Report.from_json(found).lines():
        text = Text(line)
        text.highlight_regex(r"\bpass\b", "green")
        text.highlight_regex(r"\bFAIL\b", "bold red")
        console.print(text)
