"""Which tokens end a response."""

from pathlib import Path
from typing import Any

from rl_core.models.auto import model_config
from rl_core.rollout.engine import stop_ids


def stop_ids_of(directory: Path, tokenizer: Any, trusted: bool = False) -> set[int]:
    """The end tokens of a model directory: of its tokenizer, its config.json and its generation_config.json.

    Args:
        trusted: `trust_remote_code`.
    """
    from transformers import GenerationConfig

    configs: list[Any] = [model_config(directory, trusted)]
    if (directory / "generation_config.json").exists():
        configs.append(GenerationConfig.from_pretrained(directory))
    return stop_ids(tokenizer, *configs)
