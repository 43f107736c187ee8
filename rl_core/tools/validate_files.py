"""The base model's files as a training takes them: found, read, converted where they must be, and compared with each other."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from rl_core.artifacts import fresh_scratch, scratch_of
from rl_core.checkpoint.convert import convert
from rl_core.config import Config
from rl_core.distributed import World
from rl_core.errors import DataError, ModelError
from rl_core.home import home, writable
from rl_core.locks import locked
from rl_core.models.build import empty_model
from rl_core.models.pad import settle_pad
from rl_core.models.source import ModelSource, load_tokenizer, resolve
from rl_core.rollout.batch import RolloutBatch
from rl_core.together import together

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUESTIONS = ("What is 3 + 4?", "Name a colour.", "Say nothing.", "Which word rhymes with house?")
ANSWERS = ("It is 7.", "Green", "", "Mouse, of course.")


@dataclass(frozen=True)
class Files:
    """What actor, critic and reference are built from."""

    directory: Path
    tokenizer: Any
    found: str
    """What it is, in words."""


@contextmanager
def scratch_directory(world: World) -> Iterator[Path]:
    """Where the weights go if they must be converted, on the file system of PPOFLOW_HOME; deleted behind the block. What a killed
    validation left there is deleted by the next one, which waits for one that is running."""
    scratch = scratch_of(home() / "validate")
    if not world.is_main:
        yield scratch
        return
    with locked(writable(home()) / "validate.lock"):
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def find_files(config: Config, world: World, scratch: Path) -> Files:
    """Find the base model, download it where it is not local, and look whether its parts fit each other. Collective.

    Args:
        scratch: where weights are converted that cannot be read as they are (GGUF, names of an older transformers).

    Raises:
        ModelError: there is no such model, it brings code that is not trusted, its weights are not those of its configuration,
            or its tokenizer has ids that its embedding lacks.
        DataError: the tokenizer has no chat template, or no token that could pad.
        ConfigError: `model.chat_template` or `model.revision` is wrong.
    """
    found: list[Any] = [together(lambda: _look(config, scratch) if world.is_main else None)]
    dist.broadcast_object_list(found)
    directory, description = found[0]
    tokenizer = together(lambda: _tokenizer(ModelSource(directory, trusted=config.model.trust_remote_code), config))
    return Files(directory, tokenizer, description)


def sample_batch(files: Files, rows: int, device: Any) -> RolloutBatch:
    """Questions under the model's chat template with answers of different lengths, one of them empty and one that is the last
    token of the vocabulary.

    Args:
        rows: how many.

    Raises:
        DataError: the tokenizer makes no tokens of a question.
    """
    tokenizer = files.tokenizer

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    prompts, responses = [], []
    for row in range(rows):
        chat = [{"role": "user", "content": QUESTIONS[row % len(QUESTIONS)]}]
        prompt = ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        if not prompt:
            raise DataError(f"model.name_or_path: the tokenizer makes no tokens of {chat[0]['content']!r}.")
        prompts.append(prompt)
        responses.append(ids(ANSWERS[row % len(ANSWERS)]))
    responses[0] = [max(tokenizer.get_vocab().values())]
    return RolloutBatch.from_lists(
        prompts, responses, [[0.0] * len(row) for row in responses], [False] * rows, list(range(rows)), device
    )


def _look(config: Config, scratch: Path) -> tuple[Path, str]:
    source = resolve(config.model)
    tokenizer = _tokenizer(source, config)
    directory, converted = source.directory, ""
    if source.gguf or not _fits(source, empty_model(directory, config.model)):
        fresh_scratch(home() / "validate")
        convert(source, tokenizer, scratch)
        directory, converted = scratch, ", converted to be read"
    empty = empty_model(directory, config.model)
    embedding: Any = empty.get_input_embeddings()
    rows, vocabulary = len(embedding.weight), tokenizer.get_vocab()
    token, greatest = max(vocabulary.items(), key=lambda item: item[1])
    if greatest >= rows:
        raise ModelError(
            f"model.name_or_path: the tokenizer has ids up to {greatest} ({token!r}), but the model's embedding has only {rows} "
            "rows. Give the tokenizer that belongs to the model, or resize its embedding (resize_token_embeddings)."
        )
    count = sum(parameter.numel() for parameter in empty.parameters())
    code = f", code of its own ({', '.join(path.name for path in source.code)})" if source.code else ""
    return directory, (
        f"{type(empty).__name__}, {count:,} parameters{converted}{code}; {type(tokenizer).__name__}, {len(vocabulary):,} tokens "
        f"for {rows:,} rows of the embedding"
    )


def _tokenizer(source: ModelSource, config: Config) -> Any:
    tokenizer = load_tokenizer(source, config.model.chat_template)
    if not tokenizer.chat_template:
        raise DataError(
            "model.chat_template: the tokenizer has no chat template, so messages cannot become a prompt. Set it to a Jinja "
            "file, or take an instruction-tuned model."
        )
    settle_pad(tokenizer)
    return tokenizer


def _fits(source: ModelSource, empty: "PreTrainedModel") -> bool:
    """Whether the files hold the model's tensors under its own names, so that they can be read as they are."""
    stored: dict[str, list[int]] = {}
    for path in source.weights:
        try:
            with safe_open(path, framework="pt") as file:
                stored |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 – not a dict
        except SafetensorError:  # the conversion says what is wrong with it
            return False
    aliases = empty.all_tied_weights_keys
    return stored == {name: list(tensor.shape) for name, tensor in empty.state_dict().items() if name not in aliases}
