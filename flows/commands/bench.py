"""`ppoflow bench`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

if TYPE_CHECKING:
    from rich.table import Table

    from rl_core.config import Config

Many = Parameter(negative=(), consume_multiple=False)
MICRO_BATCH = "micro_batch"
OUT_OF_MEMORY = "It ran out of memory"


def bench(
    what: Literal["step"],
    config: Path,
    /,
    *,
    overrides: Annotated[list[str] | None, Parameter(name="--set"), Many] = None,
    sweep: Annotated[list[str] | None, Many] = None,
    steps: Annotated[int, Parameter(validator=Number(gte=1))] = 2,
    warm: Annotated[int, Parameter(validator=Number(gte=0))] = 1,
    prompt_tokens: Annotated[int | None, Parameter(("--prompt-tokens", "--prompt_tokens"), validator=Number(gte=1))] = None,
    random_weights: Annotated[bool, Parameter(("--random-weights", "--random_weights"), negative=())] = False,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
) -> None:
    """Time real PPO steps of a configuration: seconds per phase, tokens/s, MFU, memory. Nothing is kept of the training.

    Prompts are random ids and responses never end early: all have the greatest length, so a step is the longest that can come.
    The reward takes no time (a reward model judges as it would). Each case of a sweep is run by itself.

    Exit code 0; 2 if a case was refused or ran out of memory and no case was measured; 1 if one crashed.

    Parameters
    ----------
    what
        step: a PPO step, from the rollout to the last update.
    config
        YAML file, such as those in configs/.
    overrides
        key=value, e.g. rollout.max_new_tokens=512; may be given several times.
    sweep
        key=value,value,…, e.g. fsdp.activation_checkpointing=false,true; several times: all combinations. micro_batch=1,2,4 sets
        trainer.per_device_train_batch_size while the batch of the step stays the same, so that accumulation makes up for it.
    steps
        Steps measured.
    warm
        Steps before them.
    prompt_tokens
        Length of the prompts; data.max_prompt_length if left out.
    random_weights
        Give the model random values of its shape: its config.json is enough, and no weights are fetched or converted.
    out
        Also write the report to this JSON file, after each case.
    as_json
        Print one JSON document instead of tables.
    """
    import tempfile

    from rl_core.errors import EXIT_CRASH, EXIT_USER, ConfigError
    from rl_core.home import home, writable

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out: there is no directory {out.parent}; make it first or name another file.")
    planned = cases(config, overrides or [], sweep or [])
    arguments = [
        f"--config_path={config}",
        f"--steps={steps}",
        f"--warm={warm}",
        *(["--random_weights"] if random_weights else []),
    ]
    arguments += [f"--prompt_tokens={prompt_tokens}"] if prompt_tokens is not None else []
    report: dict[str, Any] = {"config": str(config), "random_weights": random_weights, "warm_up_steps": warm, "steps": steps}
    report["cases"] = []
    # Beside the store, not in /tmp: converted weights may be large. The cases share them.
    with tempfile.TemporaryDirectory(dir=writable(home() / "bench")) as work:
        for number, (settings, given, settled) in enumerate(planned, start=1):
            print(f"Case {number} of {len(planned)}: {_named(settings)}", file=sys.stderr, flush=True)
            result = _measured(settled, Path(work), [*arguments, *(f"--set={text}" for text in given)])
            report["cases"].append({"settings": settings, **result})
            if out is not None:
                out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        _print(report["cases"])
    failed = {case["error"] for case in report["cases"] if "error" in case}
    if "crashed" in failed:
        raise SystemExit(EXIT_CRASH)
    if all("error" in case for case in report["cases"]):
        raise SystemExit(EXIT_USER)


def cases(path: Path, overrides: list[str], sweep: list[str]) -> list[tuple[dict[str, Any], list[str], "Config"]]:
    """Of each case what the sweep sets, all overrides, and the configuration in force.

    Raises:
        ConfigError: of any of them, before the first is run.
    """
    import itertools

    from rl_core.config import load_config
    from tasks.devices import rank_count

    plain = load_config(path, overrides)
    plain = plain.settled(rank_count(plain.launch))
    axes = [_axis(text) for text in sweep]
    found = []
    for values in itertools.product(*(values for _, values in axes)):
        settings = {key: value for (key, _), value in zip(axes, values, strict=True)}
        given = [*overrides, *(text for key, value in settings.items() for text in _overrides(key, value, plain))]
        config = load_config(path, given)
        found.append((settings, given, config.settled(rank_count(config.launch))))
    return found


def _axis(text: str) -> tuple[str, list[Any]]:
    import yaml

    from rl_core.errors import ConfigError

    key, _, listed = text.partition("=")
    try:
        values = yaml.safe_load(f"[{listed}]")
    except yaml.YAMLError:
        values = []
    if not key or not values:
        raise ConfigError(f"--sweep takes key=value,value,…, e.g. fsdp.activation_checkpointing=false,true; got {text!r}.")
    return key, values


def _overrides(key: str, value: Any, plain: "Config") -> list[str]:
    if key != MICRO_BATCH:
        return [f"{key}={json.dumps(value)}"]
    return [
        f"trainer.per_device_train_batch_size={json.dumps(value)}",
        f"trainer.train_batch_size={plain.trainer.train_batch_size}",
        "trainer.gradient_accumulation_steps=null",
        "trainer.max_tokens_per_micro_batch=null",
    ]


def _measured(config: "Config", work: Path, arguments: list[str]) -> dict[str, Any]:
    """The result of one case, or `error` (refused, out of memory, crashed) and `message`."""
    from rl_core.errors import ConfigError
    from rl_core.home import home
    from tasks.torchrun import RanksCrashed, run_ranks

    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        if "Training step done" in line:
            print(f"  {line}", file=sys.stderr, flush=True)

    result = work / "result.json"
    result.unlink(missing_ok=True)  # of the case before
    given = [f"--work={work}", f"--out={result}", *arguments]
    try:
        run_ranks("rl_core.tools.bench", given, launch=config.launch, log_path=home() / "logs" / "bench.log", on_line=show)
    except ConfigError as error:
        return {"error": "refused", "message": str(error)}
    except RanksCrashed as error:
        ended = next((line for line in lines if OUT_OF_MEMORY in line), None)
        return {"error": "crashed", "message": str(error)} if ended is None else {"error": "out of memory", "message": ended}
    return json.loads(result.read_text(encoding="utf-8"))


def _named(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()) or "as configured"


def _print(found: list[dict[str, Any]]) -> None:
    """A row for each case; of a single case a row for each phase; under them what the numbers mean."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    measured = [case for case in found if "error" not in case]
    console.print(_table_of_phases(measured[0]) if len(found) == len(measured) == 1 else _table_of_cases(found))
    if measured:
        case = measured[0]
        console.print(
            f"{case['responses']} responses a step, {case['prompt_tokens']} + {case['response_tokens']} tokens each, on "
            f"{case['ranks']} rank(s) of {case['device']}; matmul {case['matmul_tflops_per_rank']:.2f} TFLOP/s a rank"
        )
        console.print(case["formula"])
    for case in found:
        if "error" in case:
            console.print(f"{_named(case['settings'])}: {case['error']}: {case['message']}")


def _table_of_phases(case: dict[str, Any]) -> "Table":
    table = _table([], ["phase"], ["seconds", "share", "TFLOP/s a rank", "MFU"])
    seconds, mfu = case["seconds"], case["mfu"]
    for phase, taken in seconds.items():
        speed = f"{case['tflop'][phase] / taken / case['ranks']:.2f}" if phase in mfu else ""
        share = f"{mfu[phase]:.1%}" if phase in mfu else ""
        table.add_row(phase, f"{taken:.3f}", f"{taken / seconds['step']:.0%}", speed, share)
    table.caption = f"{case['tokens_per_s']:.0f} tokens/s, micro-batches {_batch(case)}, {case['gib_peak']:.2f} GiB"
    return table


def _table_of_cases(found: list[dict[str, Any]]) -> "Table":
    names = list(found[0]["settings"])
    numbers = ["s/step", "gen", "score", "update", "tokens/s", "MFU", "GiB"]
    table = _table([name.rpartition(".")[2] for name in names], ["micro × accum."], numbers)
    for case in found:
        row = [json.dumps(case["settings"][name]) for name in names]
        if "error" in case:
            table.add_row(*row, case["error"])
            continue
        seconds = case["seconds"]
        update = sum(seconds.get(name, 0.0) for name in ("update_critic", "update_actor"))
        score = sum(seconds.get(name, 0.0) for name in ("reward", "old_log_prob", "ref", "values"))
        taken = (f"{value:.3f}" for value in (seconds["step"], seconds["gen"], score, update))
        row += [_batch(case), *taken, f"{case['tokens_per_s']:.0f}", f"{case['mfu']['step']:.1%}", f"{case['gib_peak']:.2f}"]
        table.add_row(*row)
    return table


def _table(settings: list[str], texts: list[str], numbers: list[str]) -> "Table":
    from rich import box
    from rich.table import Column, Table

    columns = [Column(name, overflow="fold") for name in settings] + [Column(name) for name in texts]
    columns += [Column(name, justify="right") for name in numbers]
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _batch(case: dict[str, Any]) -> str:
    return f"{case['micro_batch']}" + (f" × {case['accumulation']}" if case["accumulation"] else "")
