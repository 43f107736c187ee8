"""A reward model's files and what it is; without torch and transformers, since keys are computed with it."""

from typing import TYPE_CHECKING, Any

from rl_core.config.reward import ModelReward
from rl_core.errors import ModelError

if TYPE_CHECKING:
    from rl_core.models.source import ModelSource


def files(config: ModelReward) -> "ModelSource":
    """The model's files on this machine.

    Raises:
        ModelError: there is no such model, or it is a GGUF file, which holds no score head.
        ConfigError: a revision of what has none.
    """
    from rl_core.models.source import resolve

    source = resolve(config, "reward")
    if source.gguf:
        raise ModelError(
            f"reward.name_or_path: {source.weights[0]} is a GGUF file, which cannot hold a reward model. Give a directory of "
            "safetensors, a URL or a Hugging Face id."
        )
    return source


def fingerprint(config: ModelReward) -> dict[str, Any]:
    """Digests of weights, configuration, code and tokenizer, and the settings that decide a score."""
    from rl_core.models.source import model_fingerprint, tokenizer_fingerprint

    source = files(config)
    return config.identity() | {"files": model_fingerprint(source) | tokenizer_fingerprint(source, None)}
