"""What a bench trains on: prompts of random ids, and where asked weights of random values, so that a model's shape is enough."""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core import train
from rl_core.artifacts import commit, fresh_scratch
from rl_core.config.model import ModelConfig
from rl_core.data.shards import Blocks
from rl_core.models import build, source
from rl_core.models.auto import model_config
from rl_core.models.local import local


def write_prompts(directory: Path, count: int, tokens: int, vocabulary: int) -> None:
    """A dataset artifact of `count` prompts of `tokens` random ids, the same each time."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (count, tokens), generator=generator).tolist()
    rows = [
        {
            "prompt_id": str(number), "input_ids": row, "text": "", "question": "", "ground_truth": None,
            "data_source": "bench", "extra_info": "{}",
        }
        for number, row in enumerate(ids)
    ]  # fmt: skip
    scratch = fresh_scratch(directory)
    blocks = Blocks(scratch, "bench")
    blocks.write(0, {"train": rows, "eval": rows[:1]}, {})
    blocks.close()
    commit(scratch, directory, kind="dataset", key="bench", results={"prompt_length": {"max": tokens}, "train_rows": count})


def write_shape(directory: Path, settings: ModelConfig) -> None:
    """A base artifact without weights: the model's config.json, its code where it has some, and a tokenizer whose tokens are
    the decimals of their ids. Of a model on the Hugging Face hub no weights are fetched.

    Raises:
        ModelError, ConfigError: there is no such model.
    """
    found = described(settings)
    config = model_config(found.directory, found.trusted, gguf=found.gguf)
    scratch = fresh_scratch(directory)
    config.save_pretrained(scratch)
    for path in found.code:
        (scratch / path.name).write_bytes(path.read_bytes())
    _counting_tokenizer(config.get_text_config().vocab_size).save_pretrained(scratch)
    commit(scratch, directory, kind="base", key="bench")


def described(settings: ModelConfig) -> source.ModelSource:
    """The files that describe a model, its weights left where they are if possible; errors as `source.resolve`."""
    name, path = settings.name_or_path, Path(settings.name_or_path).expanduser()
    if (path / "config.json").is_file():
        return source.ModelSource(path.absolute(), trusted=settings.trust_remote_code)
    if path.exists() or "://" in name or path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return source.resolve(settings)
    wanted = ("*.json", source.CODE) if settings.trust_remote_code else ("*.json",)
    return source.ModelSource(source._snapshot(name, settings.revision, wanted, "model"), trusted=settings.trust_remote_code)


def _counting_tokenizer(size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0", unk_token="0")


@contextmanager
def for_a_bench(random: bool) -> Iterator[None]:
    """Runs built within need no room for checkpoints, since none are saved.

    Args:
        random: models get random weights, the same for actor, critic and reference however they are spread.
    """
    load, check = build._load, train.check_room_for
    train.check_room_for = lambda run: None
    if random:
        build._load = _fill  # type: ignore[assignment]
    try:
        yield
    finally:
        build._load, train.check_room_for = load, check


@torch.no_grad()
def _fill(tensors: dict[str, torch.Tensor], *_: Any) -> None:
    for name, tensor in tensors.items():
        if "norm" in name:
            local(tensor).fill_(1.0)
            continue
        device = local(tensor).device
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.empty(tensor.shape, device=device).normal_(0.0, 0.02, generator=generator)
        if isinstance(tensor, DTensor):
            shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            whole = whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        local(tensor).copy_(whole)


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
