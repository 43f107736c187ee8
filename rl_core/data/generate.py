"""reasoning-gym's problems, written to a file by a child process with a fixed hash seed.

Some generators (`word_ladder`, `ransom_note`, …) walk over sets of texts, so their problems differ from process to process
unless PYTHONHASHSEED is fixed before the interpreter starts. The file is kept, so that an interrupted tokenization goes on
with the very problems that it began with.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import rl_core
from rl_core.config.data import ReasoningGymSource
from rl_core.data import values
from rl_core.digests import digest_json
from rl_core.errors import EXIT_USER, ConfigError, DataError, RewardError
from rl_core.home import home, writable


def version() -> str:
    """The installed version of reasoning-gym.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError:
        raise ConfigError("reasoning-gym is not installed, but the configuration names it; pip install reasoning-gym.") from None


def create(name: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    """A `reasoning_gym` dataset.

    Raises:
        ConfigError: no such generator or option (with the nearest one), or a value that the generator refuses.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(f"data.source.dataset = {name!r}: reasoning-gym has no such generator ({_nearest(name, DATASETS)}).")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    for option in options:
        if option in ("size", "seed"):
            raise ConfigError(f"data.source.options.{option}: set data.source.{option} instead.")
        if option not in known:
            raise ConfigError(f"data.source.options.{option}: {name} has no such option ({_nearest(option, known)}).")
    try:
        if name == "composite":
            options = {**options, "datasets": [DatasetSpec(**item) for item in options.get("datasets", [])]}
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"data.source.options: {name} refuses {options} ({error or type(error).__name__}).") from None


def generate(source: ReasoningGymSource) -> Path:
    """The problems as JSON Lines (`values.dumps`), generated unless they are there already.

    Raises:
        ConfigError: see `create`.
        DataError: the generator broke.
    """
    spec = {"dataset": source.dataset, "size": source.size, "seed": source.seed, "options": source.options}
    directory = writable(home() / "datasets" / "reasoning_gym")
    path = directory / f"{digest_json({**spec, 'version': version()})[:32]}.jsonl"
    if not path.exists():
        root = str(Path(rl_core.__file__).parents[1])
        places = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(places)}
        command = [sys.executable, "-m", "rl_core.data.generate", json.dumps(spec), str(path)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        message = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        if child.returncode == EXIT_USER:
            raise ConfigError(message)
        if child.returncode:
            raise DataError(f"data.source: reasoning-gym's generator {source.dataset} broke: {message}.")
    return path


def row(entry: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """A generated problem as a row: the columns of any source, and what `scorer` needs to judge a response later."""
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "data_source": spec["dataset"],
        "metadata": entry["metadata"],
        "entry": {"question": entry["question"], "answer": entry["answer"]},
        "generator": {"dataset": spec["dataset"], "options": spec["options"]},
    }


def entry_of(extra_info: dict[str, Any]) -> dict[str, Any]:
    """The reasoning-gym entry that a row was made from.

    Raises:
        RewardError: the row does not come from reasoning-gym.
    """
    if not {"metadata", "entry", "generator"} <= set(extra_info):
        raise RewardError(
            "reward.kind = reasoning_gym judges prompts of reasoning-gym's own generators only, and these prompts come from "
            "elsewhere. Set data.source.kind to reasoning_gym, or reward.kind to function with a Python file of yours."
        )
    return {**extra_info["entry"], "metadata": extra_info["metadata"]}


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def _main(spec: dict[str, Any], path: Path) -> None:
    problems = create(spec["dataset"], spec["size"], spec["seed"], spec["options"])
    parent = os.getppid()
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for index in range(spec["size"]):
                if os.getppid() != parent:  # killed: nobody waits for the rest
                    return
                file.write(values.dumps(row(problems[index], spec)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USER)
