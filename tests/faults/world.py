"""The tiny training that faults strike, and what is looked at afterwards."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.faults import forked
from tests.pipeline import tiny_settings
from tests.tiny import tiny_model

STEPS = 3
RANKS = 2
TIMES = ("timing_s/", "perf/")


@dataclass(frozen=True)
class World:
    """A directory with a configuration, a dataset, a base model and the uninterrupted run."""

    directory: Path

    @property
    def whole(self) -> Path:
        """The run that nothing struck."""
        return self.directory / "whole"

    def arguments(self, output: Path, **settings: Any) -> list[str]:
        """The command line of a training in `output`."""
        named = {
            "config_path": self.directory / "config.yaml",
            "dataset": self.directory / "inputs" / "dataset",
            "base": self.directory / "inputs" / "base",
            "output_dir": output,
        }
        words = [f"--{name}={value}" for name, value in named.items()]
        return words + [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]


def make_world(directory: Path) -> World:
    """Make one, if it is not there yet. Needs `forked.preload()`."""
    world = World(directory)
    if (directory / "ready").exists():
        return world
    directory.mkdir(parents=True, exist_ok=True)

    def settings() -> None:
        values = tiny_settings(directory)
        tiny_model(directory / "model", num_hidden_layers=1)  # over it: half of a rank's time is torch's, once for each shape
        values["trainer"] = {
            "max_steps": STEPS,
            "train_batch_size": 4,
            "ppo_mini_batch_size": 2,
            "per_device_train_batch_size": 2,
        }
        values["reward"]["timeout_s"] = None  # in the rank's own process: another one would be an import of seconds
        values["checkpoint"] = {"save_steps": 1, "keep": 2}
        values["launch"] |= {"stall_report_s": 0, "nproc_per_node": RANKS}
        values["actor"]["learning_rate"] = values.setdefault("critic", {})["learning_rate"] = 1e-2
        (directory / "config.yaml").write_text(yaml.safe_dump(values))

    def inputs() -> None:
        import torch

        from rl_core.config import load_config
        from rl_core.distributed import World as Ranks
        from rl_core.inputs import prepare

        prepare(None, None, load_config(directory / "config.yaml", []), directory / "inputs", Ranks(0, 1, torch.device("cpu")))

    forked.call(settings)
    if not (directory / "inputs").exists():  # they can be brought to a machine that has no `datasets`
        forked.call(inputs)
    ended = forked.train(world.arguments(world.whole, **{"checkpoint.keep": STEPS + 1}), RANKS, directory / "whole.log")
    assert ended.code == 0, ended.log
    (directory / "ready").touch()
    return world


def steps_of(run: Path) -> list[int]:
    """Of the committed checkpoints by name, whole or not."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def not_whole(run: Path) -> list[str]:
    """Committed directories that are not what their manifest says, every byte read."""
    from rl_core.artifacts import open_artifact
    from rl_core.errors import BrokenArtifact

    wrong = []
    for path in [*(run / "checkpoints").glob("step_*"), *run.glob("policy")]:
        try:
            open_artifact(path, remembered=False)
        except BrokenArtifact as error:
            wrong.append(str(error))
    return wrong


def differences(run: Path, whole: Path) -> list[str]:
    """In what a run differs, bit by bit, from the one that nothing struck; times left out."""
    found = []
    for path in [*(run / "checkpoints").glob("step_*"), run / "policy"]:
        there = whole / path.relative_to(run)
        if not path.is_dir() or _digest(path) != _digest(there):
            found.append(str(path.relative_to(run)))
    for name in ("metrics.jsonl", "samples.jsonl"):
        if _rows(run / name) != _rows(whole / name):
            found.append(name)
    return found


def same_draws(run: Path, whole: Path) -> list[str]:
    """Whether a run that went on on another number of ranks met the same prompts and drew the same tokens, and has nearly the
    same metrics: sums over ranks are rounded otherwise."""
    found = []
    here, there = (_rows(path / "samples.jsonl") for path in (run, whole))
    if [(row["prompt"], row["response"]) for row in here] != [(row["prompt"], row["response"]) for row in there]:
        found.append("samples.jsonl")
    for mine, theirs in zip(_rows(run / "metrics.jsonl"), _rows(whole / "metrics.jsonl"), strict=True):
        off = [name for name, value in theirs.items() if abs(mine[name] - value) > 1e-4 * max(1.0, abs(value))]
        found += [f"metrics.jsonl: {name} of step {theirs['step']}" for name in off]
    return found


def _digest(path: Path) -> str:
    return json.loads((path / "manifest.json").read_text())["digest"]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]
