"""A tiny pipeline as a user has it: a configuration with model, prompts and reward on disk, and `ppoflow` as a process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import tiny_model, tiny_prompts

ROOT = Path(__file__).resolve().parents[1]
PPOFLOW = (sys.executable, "-m", "flows.cli")
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of digits in the response."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
'''


def tiny_settings(directory: Path) -> dict[str, Any]:
    """Sections of a configuration whose model, prompts and reward lie under `directory`; one rank, two steps."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    return {
        "model": {"name_or_path": str(tiny_model(directory / "model"))},
        "data": {
            "source": {"kind": "files", "path": str(tiny_prompts(directory / "prompts.jsonl"))},
            "max_prompt_length": 32,
            "eval_fraction": 0.25,
        },
        "reward": {"kind": "function", "path": str(directory / "reward.py")},
        "rollout": {"max_new_tokens": 4},
        "trainer": {"max_steps": 2, "train_batch_size": 8, "per_device_train_batch_size": 4},
        "actor": {"learning_rate": 1e-3},
        "launch": {"device": "cpu", "nproc_per_node": 1, "threads_per_rank": 1},
        "checkpoint": {"save_steps": 1},
        "evaluation": {"prompts": 8, "samples": 4},
        "registry": {"name": "tiny"},
    }


def tiny_config(directory: Path) -> Path:
    """`tiny_settings` as a YAML file."""
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_settings(directory)), encoding="utf-8")
    return path


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment for ppoflow over `home`, without the settings of anybody's Prefect or MLflow."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "PPOFLOW_"))}
    return kept | {"PPOFLOW_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def ppoflow(*arguments: str | Path, home: Path, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
    """Run `ppoflow …` in the project's root."""
    command = [*PPOFLOW, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )
