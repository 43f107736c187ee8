"""What transformers' reading of GGUF files lacks."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within, a file's metadata is parsed once (seconds for a vocabulary), however often transformers opens the file, and the
    table of tensor names is made once, not for each module of the model."""
    try:
        import gguf
    except ImportError:  # where it is needed, transformers says so
        yield
        return
    made: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, make in made.items():
        setattr(gguf, name, functools.cache(make))
    try:
        yield
    finally:
        for name, make in made.items():
            setattr(gguf, name, make)


def set_special_tokens(tokenizer: "PreTrainedTokenizerBase", path: Path) -> None:
    """As the file has them: transformers 5.17 takes Llama's bos for its eos, so that no response would ever end."""
    import gguf

    fields = gguf.GGUFReader(str(path)).fields
    for role, name in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}.items():
        field = fields.get(f"tokenizer.ggml.{name}_token_id")
        if field is not None:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(field.contents())))
