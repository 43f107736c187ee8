"""A small configuration, and the inputs of a training as the stages before it leave them."""

from pathlib import Path
from typing import Any

from rl_core.config import Config, parse_config
from tasks.store import Key, Reference, produce


def config(directory: Path, **overrides: Any) -> Config:
    """`overrides` have `__` for the dots of keys."""
    directory.mkdir(parents=True, exist_ok=True)
    reward = directory / "reward.py"
    if not reward.exists():
        reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    values = {
        "model": {"name_or_path": "somewhere/model"},
        "data": {"source": {"kind": "files", "path": "prompts.jsonl"}},
        "reward": {"kind": "function", "path": str(reward)},
        "registry": {"name": "letters", "experiment": str(directory.name)},
        "trainer": {"max_steps": 4},
        "launch": {"device": "cpu", "nproc_per_node": 1, "threads_per_rank": 1},
    }
    return parse_config(values, {key.replace("__", "."): value for key, value in overrides.items()})


def inputs(text: str = "prompts") -> tuple[Reference, Reference]:
    """Dataset and base model."""

    def make(scratch: Path) -> dict[str, Any]:
        (scratch / "file").write_text(text)
        return {"train_rows": 100}

    dataset = produce(Key("tokenize_dataset", "d" * 64, {}), make)
    return dataset, produce(Key("convert_checkpoint", "b" * 64, {}), make)
