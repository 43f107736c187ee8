"""`ppoflow …`: parses, calls, prints.

Prefect, MLflow and torch are imported only by what needs them, so `--help` and mistakes in a configuration answer at once.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from flows.commands.bench import bench
from flows.commands.doctor import doctor
from flows.commands.plan import plan
from flows.commands.samples import samples
from flows.commands.status import status
from flows.commands.store import store
from flows.commands.validate import validate
from flows.commands.verify import verify
from flows.logs import TRACEBACK, write_traceback
from rl_core.entry import USER_ERRORS
from rl_core.errors import (
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER,
    BrokenArtifact,
    ConfigError,
    Interrupted,
    PpoflowError,
    StoreError,
)
from rl_core.home import home, writable
from tasks.environment import prepare

EXIT_SIGINT = 130

app = App(
    name="ppoflow",
    help="From a base model, prompts and a reward to a promoted policy. PPOFLOW_HOME (default ./.ppoflow) holds all it writes. "
    "With --traceback an error also shows where it came from.",
    suppress_keyboard_interrupt=False,  # said below, with the command that continues
)
for command in (bench, doctor, plan, samples, status, store, validate, verify):
    app.command(command)
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)]


@app.command
def run(
    config: Path,
    /,
    *,
    overrides: Overrides = None,
    fresh: bool = False,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
) -> None:
    """Run the pipeline; what exists already is reused, and an interrupted training goes on.

    Parameters
    ----------
    config
        YAML file, such as those in configs/.
    overrides
        key=value, e.g. trainer.max_steps=4; may be given several times.
    fresh
        Make everything again, the training from step 0.
    json_file
        Also write the report to this file.
    """
    from rl_core.config import load_config

    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json: there is no directory {json_file.parent}; make it first or name another file.")
    settings = load_config(config, overrides or ())
    writable(home())

    from flows.logs import quiet_console
    from flows.post_training import post_training
    from flows.report import print_report
    from tasks.prefect_server import start_server

    quiet_console()
    start_server()

    report = post_training(settings, fresh=fresh)
    if json_file is not None:
        _write_json(json_file, report)
    print_report(report)


@app.command
def explain(config: Path, /, *, overrides: Overrides = None) -> None:
    """Say for each stage whether it would be reused, resume or run, and why. Nothing is run.

    Parameters
    ----------
    config
        YAML file, such as those in configs/.
    overrides
        key=value, e.g. trainer.max_steps=4; may be given several times.
    """
    from rl_core.config import load_config

    settings = load_config(config, overrides or ())
    writable(home())
    prepare()

    from flows.explain import explain as foresee

    for stage in foresee(settings):
        print(f"{stage.stage:<18} {stage.outcome:<8} {stage.reason}")


@app.command
def promote(name: str, version: int, /) -> None:
    """Make a registered version the champion, whatever the gate said.

    Parameters
    ----------
    name
        The registered model (registry.name of the configuration).
    version
        The version to promote.
    """
    from flows.promotion import promote as promote_version

    print(promote_version(name, version))


@app.command
def rollback(name: str, /) -> None:
    """Give the champion's place back to the version that had it before.

    Parameters
    ----------
    name
        The registered model (registry.name of the configuration).
    """
    from flows.promotion import rollback as roll_back

    print(roll_back(name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs a command and exits with its code; an error is one paragraph on stderr."""
    signal.signal(signal.SIGTERM, _terminate)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--traceback" in words:
        words.remove("--traceback")
        os.environ[TRACEBACK] = "1"
    sys.exit(_guarded(lambda: app(words, exit_on_error=False, print_error=False, result_action="return_value"), words))


def _terminate(number: int, frame: FrameType | None) -> None:
    """After the flow has ended its ranks and told Prefect, which hands the signal on to the handler that it found here."""
    raise Interrupted("stopped by SIGTERM; what was saved is kept.")


def _guarded(call: Callable[[], object], words: list[str]) -> int:
    try:
        call()
    except CycloptsError as error:
        return _say(f"{' '.join(str(error).split())} See ppoflow --help.", EXIT_USER)
    except PpoflowError as error:
        return _say(str(error), _exit_code(error), words, error)
    except KeyboardInterrupt as error:
        return _say("stopped by Ctrl-C.", EXIT_SIGINT, words, error)
    except Exception as error:  # noqa: BLE001 - the outermost place: a user gets a paragraph, the traceback goes to a file
        text = _without_prefect(error) or "unforeseen error: " + " ".join(f"{type(error).__name__}: {error}".split())[:600]
        return _say(f"{text}{_where_it_is(error)}", EXIT_CRASH, words, error)
    return EXIT_DONE


def _without_prefect(error: Exception) -> str | None:
    """What it means that Prefect's client, the only one of httpx in this process, has no connection any more."""
    import httpx

    if not isinstance(error, httpx.TransportError):
        return None
    return (
        f"Prefect's server at {os.environ.get('PREFECT_API_URL', 'its own address')} does not answer ({error}). Finished stages "
        "and committed checkpoints are kept, so nothing is computed twice: start the server again (or unset PREFECT_API_URL to "
        "run without one), then run the same command"
    )


def _exit_code(error: PpoflowError) -> int:
    if isinstance(error, Interrupted):
        return EXIT_INTERRUPTED
    return EXIT_USER if isinstance(error, USER_ERRORS) and not isinstance(error, BrokenArtifact) else EXIT_CRASH


def _say(message: str, code: int, words: Sequence[str] = (), error: BaseException | None = None) -> int:
    """Print the paragraph and, for `run`, the command that continues; returns the exit code."""
    if error is not None and os.environ.get(TRACEBACK):
        import traceback

        traceback.print_exception(error)
    print(f"ppoflow: error: {message}", file=sys.stderr)
    if words[:1] == ["run"]:
        print(f"ppoflow: to continue: {_command()}", file=sys.stderr)
    return code


def _command() -> str:
    """What to type to go on: this process's command, without `--fresh` once the training has begun again from step 0."""
    from tasks.runs import begun_afresh

    settings = [f"PPOFLOW_HOME={shlex.quote(os.environ['PPOFLOW_HOME'])}"] if os.environ.get("PPOFLOW_HOME") else []
    module = sys.modules["__main__"].__spec__
    if module is not None:
        program = [_as_typed(sys.executable), "-m", module.name]
    elif sys.argv[0].endswith(".py"):
        program = [_as_typed(sys.executable), _as_typed(sys.argv[0])]
    else:
        program = [_as_typed(sys.argv[0])]
    arguments = [word for word in sys.argv[1:] if word != "--fresh" or not begun_afresh]
    return " ".join([*settings, shlex.join([*program, *arguments])])


def _as_typed(program: str) -> str:
    """The name of a program that is on PATH, else its path, relative where it is below the working directory."""
    path = Path(program).absolute()
    found = shutil.which(path.name)
    if found is not None and Path(found).absolute() == path:
        return path.name
    if not path.is_relative_to(Path.cwd()):
        return str(path)
    relative = str(path.relative_to(Path.cwd()))
    return relative if "/" in relative else f"./{relative}"


def _where_it_is(error: BaseException) -> str:
    try:
        log = write_traceback(error)
    except StoreError:
        return ". Set PPOFLOW_TRACEBACK=1 to see the traceback."
    return f". The traceback is in {log}; PPOFLOW_TRACEBACK=1 shows it here."


def _write_json(path: Path, report: object) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}.") from None


if __name__ == "__main__":
    main()
