"""Hugging Face safetensors or GGUF → the base artifact from which every rank loads its own shards.

Safetensors go over piece by piece: no tensor larger than a piece is ever in memory. One process, no process group.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rl_core.checkpoint.dcp import write
from rl_core.errors import ModelError
from rl_core.models.auto import loading, model_config, model_of
from rl_core.models.gguf_files import parsed_once
from rl_core.models.pad import settle_pad
from rl_core.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PIECE_BYTES = 2**26
"""Rows of a tensor are read and written in pieces of at most this size."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    rows: Callable[[int, int], Tensor]
    """`rows(start, stop)` along the first dimension (a scalar ignores them)."""


def convert(source: ModelSource, tokenizer: "PreTrainedTokenizerBase", scratch: Path) -> dict[str, Any]:
    """Write `weights/`, config.json, generation_config.json, tokenizer files and aliases.json into `scratch`.

    Args:
        tokenizer: with its final chat template; a pad token is set where it has none, as in tokenization.

    Returns:
        Model type, class, number of tensors and parameters, and their types.

    Raises:
        ModelError: the weights are not those that config.json describes; the first ten differences are named.
        DataError: the tokenizer has no token that could pad.
    """
    with parsed_once():
        config, empty, tensors = _read(source)
    aliases = dict(empty.all_tied_weights_keys)

    write(scratch / "weights", _Planner(tensors), {}, alone=True)
    settle_pad(tokenizer)
    tokenizer.save_pretrained(scratch)
    (scratch / "aliases.json").write_text(json.dumps(aliases, indent=1), encoding="utf-8")
    if source.gguf:
        config.architectures = [type(empty).__name__]
        config.save_pretrained(scratch)
        empty.generation_config.save_pretrained(scratch)
    else:
        for name in ("config.json", "generation_config.json"):
            if (source.directory / name).exists():
                shutil.copy2(source.directory / name, scratch / name)
    _carry_code(source, scratch)
    return {
        "model_type": config.model_type, "architecture": type(empty).__name__, "tensors": len(tensors),
        "parameters": sum(tensor.shape.numel() for tensor in tensors.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
    }  # fmt: skip


def _read(source: ModelSource) -> tuple["PretrainedConfig", "PreTrainedModel", dict[str, LazyTensor]]:
    """Configuration, model on the meta device, and the model's tensors (of tied ones the first only)."""
    config = model_config(source.directory, source.trusted, gguf=source.gguf, section=source.section)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{source.section}.name_or_path: {source.directory} holds quantized weights. Give the original ones.")
    with torch.device("meta"):
        empty = model_of(config, torch.float32, trusted=source.trusted, section=source.section)
    aliases = dict(empty.all_tied_weights_keys)
    expected = {name: tensor for name, tensor in empty.state_dict().items() if name not in aliases}
    tensors = _from_gguf(source, empty) if source.gguf else _from_safetensors(source, empty, aliases)
    if not source.gguf and tensors.keys() != expected.keys():
        # Perhaps under the names of an older transformers: its own loader knows how to translate them.
        tensors = _through_transformers(source, aliases)
    _check(tensors, expected, source)
    return config, empty, tensors


def _carry_code(source: ModelSource, scratch: Path) -> None:
    """The model's own code goes along where it is trusted; where it is not, nothing points to it any more."""
    for path in source.code:
        shutil.copy2(path, scratch / path.name)
    for path in () if source.trusted else (scratch / "config.json", scratch / "tokenizer_config.json"):
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if settings.pop("auto_map", None) is not None:
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _from_safetensors(source: ModelSource, empty: "PreTrainedModel", aliases: dict[str, str]) -> dict[str, LazyTensor]:
    """The files' tensors under the model's names; what the model does not store is left out."""
    known = set(empty.state_dict())
    ignored = [re.compile(pattern) for pattern in empty._keys_to_ignore_on_load_unexpected or ()]
    found: dict[str, LazyTensor] = {}
    for path in source.weights:
        for stored, tensor in _stored(path, source).items():
            # Files of a bare backbone (GPT-2's on the hub) lack the prefix.
            name = stored if stored in known else f"{empty.base_model_prefix}.{stored}"
            if name in known or not any(pattern.search(stored) for pattern in ignored):
                found[name if name in known else stored] = tensor
    for alias, original in aliases.items():
        tied = found.pop(alias, None)
        if tied is not None and not _equal(tied, found.setdefault(original, tied)):
            raise ModelError(
                f"{source.section}.name_or_path: config.json in {source.directory} ties {alias} to {original}, but the files "
                "hold different values for them. Set tie_word_embeddings to false there."
            )
    return found


def _stored(path: Path, source: ModelSource) -> dict[str, LazyTensor]:
    """The tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: _lazy(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 – not a dict
    except SafetensorError as error:
        raise ModelError(f"{source.section}.name_or_path: {path} is damaged ({error}). Bring the model again.") from error


def _equal(one: LazyTensor, other: LazyTensor) -> bool:
    if one is other or one.shape != other.shape:
        return one is other
    pieces = [item.tensor_data.chunk for item in _pieces("", one) if item.tensor_data is not None]
    spans = [(piece.offsets[0], piece.offsets[0] + piece.sizes[0]) if piece.sizes else (0, 0) for piece in pieces]
    return all(torch.equal(one.rows(*span), other.rows(*span)) for span in spans)


def _lazy(path: Path, name: str, header: Any) -> LazyTensor:
    from safetensors.torch import _getdtype  # the only map of its type names

    shape = torch.Size(header.get_shape())

    def rows(start: int, stop: int) -> Tensor:
        # Opened for each piece and copied: a mapping left open would keep all its pages in memory.
        with safe_open(path, framework="pt") as file:
            return file.get_slice(name)[start:stop].clone() if shape else file.get_tensor(name).clone()

    return LazyTensor(shape, _getdtype(header.get_dtype()), rows)


def _from_gguf(source: ModelSource, empty: "PreTrainedModel") -> dict[str, LazyTensor]:
    """Dequantize the whole model to float32, as transformers' `from_pretrained` does (which would ask for accelerate)."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    [path] = source.weights
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty, torch_dtype=torch.float32)
    return {name: _held(tensor) for name, tensor in parsed["tensors"].items()}


def _through_transformers(source: ModelSource, aliases: dict[str, str]) -> dict[str, LazyTensor]:
    """Load the whole model into memory, in the type that config.json names."""
    from transformers import AutoModelForCausalLM

    with loading(source.directory, "the weights", source.trusted, source.section):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.directory, dtype="auto", trust_remote_code=source.trusted, output_loading_info=True
        )
    model, report = loaded
    _refuse({what: sorted(map(str, report[f"{what}_keys"])) for what in ("missing", "unexpected", "mismatched")}, source)
    return {name: _held(tensor) for name, tensor in model.state_dict().items() if name not in aliases}


def _held(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, lambda start, stop: tensor[start:stop] if tensor.dim() else tensor)


def _check(tensors: dict[str, LazyTensor], expected: dict[str, Tensor], source: ModelSource) -> None:
    misshapen = [
        f"{name} {list(tensors[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    _refuse({"missing": missing, "unexpected": unexpected, "of another shape": misshapen}, source)


def _refuse(problems: dict[str, list[str]], source: ModelSource) -> None:
    """Raise a ModelError naming the first ten of each kind, if there are any."""
    if any(problems.values()):
        said = "; ".join(f"{len(names)} {what}: {', '.join(names[:10])}" for what, names in problems.items() if names)
        raise ModelError(
            f"{source.section}.name_or_path: the weights in {source.directory} are not those of its config.json ({said})."
        )


class _Planner(DefaultSavePlanner):
    """Plans pieces of lazy tensors, each resolved only when it is written."""

    def __init__(self, tensors: dict[str, LazyTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.tensors = tensors

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, tensor in self.tensors.items() for item in _pieces(name, tensor)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        piece = write_item.tensor_data.chunk
        start, length = (piece.offsets[0], piece.sizes[0]) if piece.sizes else (0, 0)
        return self.tensors[write_item.index.fqn].rows(start, start + length)


def _pieces(name: str, tensor: LazyTensor) -> list[WriteItem]:
    shape = tensor.shape
    total = shape[0] if shape else 1
    row_bytes = shape.numel() // max(total, 1) * tensor.dtype.itemsize
    step = max(1, PIECE_BYTES // max(row_bytes, 1))
    items = []
    for start in range(0, total, step):
        length = min(step, total - start)
        offsets = torch.Size([start, *[0] * (len(shape) - 1)]) if shape else torch.Size()
        sizes = torch.Size([length, *shape[1:]]) if shape else torch.Size()
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=tensor.dtype), shape)
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return items
