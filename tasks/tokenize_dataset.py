"""Stage 1: prompts with their chat template as token ids, in memory-mapped shards, split by content."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config
from tasks.caching import stage_task
from tasks.store import Key, Reference, Stage, produce

if TYPE_CHECKING:
    from rl_core.models.source import ModelSource

STAGE = Stage(
    "tokenize_dataset",
    version=1,
    sources=(
        "rl_core/data",
        "rl_core/models/auto.py",
        "rl_core/models/gguf_files.py",
        "rl_core/models/pad.py",
        "rl_core/models/source.py",
    ),
    libraries=("transformers", "tokenizers", "datasets", "gguf"),
)


def key(config: Config, source: "ModelSource") -> Key:
    """The key of the dataset: the rows, the tokenizer with its chat template, and how the one meets the other."""
    from rl_core.data.sources import source_fingerprint
    from rl_core.models.source import tokenizer_fingerprint

    return STAGE.key(
        config={"data": config.data.identity()},
        inputs={
            "rows": source_fingerprint(config.data),
            "tokenizer": tokenizer_fingerprint(source, config.model.chat_template),
        },
    )


def tokenize(key: Key, config: Config, source: "ModelSource", fresh: bool = False) -> Reference:
    """The tokenized prompts of `key`. An interrupted tokenization goes on with the shards that it finished.

    Args:
        source: whose tokenizer is used.
        fresh: tokenize again although it was done.
    """

    def write(scratch: Path) -> dict[str, Any]:
        from rl_core.data.tokenize import tokenize
        from rl_core.models.source import load_tokenizer

        return tokenize(config.data, load_tokenizer(source, config.model.chat_template), scratch)

    return produce(key, write, fresh, keep_scratch=True)


tokenize_dataset = stage_task(tokenize, STAGE)
