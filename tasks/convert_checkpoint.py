"""Stage 2: the base model as a sharded checkpoint from which every rank loads its own part."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config
from tasks.caching import stage_task
from tasks.store import Key, Reference, Stage, produce

if TYPE_CHECKING:
    from rl_core.models.source import ModelSource

STAGE = Stage(
    "convert_checkpoint",
    version=1,
    sources=(
        "rl_core/checkpoint/convert.py", "rl_core/checkpoint/dcp.py", "rl_core/checkpoint/metadata.py", "rl_core/models",
    ),
    libraries=("torch", "transformers", "gguf"),
)  # fmt: skip


def key(config: Config, source: "ModelSource") -> Key:
    """The key of the base model: its files, and its tokenizer with the chat template in force."""
    from rl_core.models.source import model_fingerprint, tokenizer_fingerprint

    return STAGE.key(
        config={},
        inputs={
            "model": model_fingerprint(source),
            "tokenizer": tokenizer_fingerprint(source, config.model.chat_template),
        },
    )


def convert(key: Key, config: Config, source: "ModelSource", fresh: bool = False) -> Reference:
    """The converted base model of `key`.

    Args:
        source: the model's files.
        fresh: convert again although it was done.
    """

    def write(scratch: Path) -> dict[str, Any]:
        from rl_core.checkpoint.convert import convert
        from rl_core.models.source import load_tokenizer

        return convert(source, load_tokenizer(source, config.model.chat_template), scratch)

    return produce(key, write, fresh)


convert_checkpoint = stage_task(convert, STAGE)
