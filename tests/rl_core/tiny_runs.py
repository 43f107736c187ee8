"""Runs of a tiny model as `rl_core.train` builds them, on the ranks that a test has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_core.artifacts import open_artifact
from rl_core.config import Config, parse_config
from tests.tiny import tiny_model, tiny_prompts

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
"""


def config_for(directory: Path, overrides: dict[str, Any]) -> Config:
    """AdamW's ε is large, so that an update is nearly proportional to the gradient; with a small one the first update is the
    gradient's sign, and rounding decides where it is 0."""
    values = {
        "model": {"name_or_path": str(directory / "model")},
        "data": {"source": {"kind": "files", "path": str(directory / "prompts.jsonl")}, "eval_fraction": 0.2},
        "reward": {"kind": "function", "path": str(directory / "reward.py")},
        "rollout": {"max_new_tokens": 8, "n": 2},
        "algorithm": {"kl_coef": 0.1, "entropy_coeff": 0.01},
        "trainer": {"max_steps": 1, "train_batch_size": 5, "ppo_mini_batch_size": 5, "per_device_train_batch_size": 3},
        "actor": {"learning_rate": 1e-2, "adam_epsilon": 1.0},
        "critic": {"learning_rate": 1e-2, "adam_epsilon": 1.0},
        "launch": {"device": "cpu"},
    }
    return parse_config(values, overrides)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a dataset and a base model, some of whose tensors are large enough for moments in 8 bits."""
    from rl_core.distributed import World
    from rl_core.inputs import prepare

    directory = tmp_path_factory.mktemp("tiny-runs")
    patch = pytest.MonkeyPatch()
    patch.setenv("PPOFLOW_HOME", str(directory / "home"))
    tiny_model(directory / "model", hidden_size=64, intermediate_size=128, initializer_range=0.2)
    tiny_prompts(directory / "prompts.jsonl", 60)
    (directory / "reward.py").write_text(REWARD)
    prepare(None, None, config_for(directory, {}), directory, World(0, 1, torch.device("cpu")))
    yield directory
    patch.undo()


def built(rank: int, directory: Path, output: str, overrides: dict[str, Any]) -> Any:
    """A run in the directory `output`, on the ranks that there are. Collective."""
    from rl_core.distributed import World
    from rl_core.train import build

    world = World(rank, dist.get_world_size(), torch.device("cpu"))
    dataset, base = (open_artifact(directory / name) for name in ("dataset", "base"))
    (directory / output).mkdir(exist_ok=True)
    config = config_for(directory, overrides).settled(world.size)
    return build(config, dataset, base, directory / output, world, lambda: False)
