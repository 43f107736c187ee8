"""A stored policy → a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` opens.

One process and no collectives: rank 0 of a training can do it while the others wait elsewhere. At most one output file's
tensors are in memory. Names and shapes are compared with the model that config.json describes before anything is written.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_core.checkpoint.dcp import compare, load_tensors, stored_tensors
from rl_core.config.model import ModelConfig
from rl_core.config.roles import LoraConfig
from rl_core.errors import ModelError
from rl_core.models.build import empty_model
from rl_core.models.lora import merged, peft_can_open, peft_config, target_layers

log = logging.getLogger(__name__)

SHARD_BYTES = 2 * 10**9
NOT_COPIED = {"aliases.json", "manifest.json", "config.json", "model.safetensors.index.json"}
ADAPTER_DIRECTORY = "adapter"


def export_policy(
    weights: Path,
    prefix: str,
    base_dir: Path,
    out: Path,
    dtype: torch.dtype = torch.float32,
    *,
    lora: LoraConfig | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write config, tokenizer, code of the model's own and safetensors of a policy into the directory `out`.

    Args:
        weights: tensor directory: of a checkpoint (`…/step_000010/tensors`), or of a base artifact (`…/weights`).
        prefix: of the policy's names in it: `actor.` or empty.
        base_dir: base artifact, for configuration and tokenizer (with `lora` for the weights too).
        out: made where missing.
        dtype: type of the exported weights.
        lora: what the adapters in `weights` were trained with: they are merged into the base's weights, and written by
            themselves in peft's format (`adapter/`, float32) where peft can open that. None: `weights` holds the whole policy.
        trust_remote_code: whether the model's own code may run.

    Raises:
        ModelError: nothing has that prefix, or the tensors are not those of the model.
        BrokenArtifact: `weights` cannot be read.
    """
    causal = empty_model(base_dir, ModelConfig(name_or_path=str(base_dir), trust_remote_code=trust_remote_code))
    expected = {name: tensor for name, tensor in causal.state_dict().items() if name not in causal.all_tied_weights_keys}
    targets = {} if lora is None else target_layers(causal, lora)
    if lora is None:
        policy = _Stored(weights, prefix, expected)
    else:
        policy = _Stored(base_dir / "weights", "", expected)
        adapters = _Stored(weights, prefix, _adapter_tensors(targets, lora.rank))
    out.mkdir(parents=True, exist_ok=True)

    def content(names: list[str]) -> dict[str, Tensor]:
        tensors = policy.read(names)
        for layer in [name.removesuffix(".weight") for name in names]:
            if lora is not None and layer in targets:
                lora_a, lora_b = adapters.read([f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"]).values()
                transposed = not isinstance(targets[layer], nn.Linear)
                tensors[f"{layer}.weight"] = merged(
                    tensors[f"{layer}.weight"], lora_a, lora_b, lora.alpha / lora.rank, transposed
                )
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in expected.items():
        size += tensor.numel() * dtype.itemsize
        if files[-1] and size > SHARD_BYTES:
            files.append([])
            size = tensor.numel() * dtype.itemsize
        files[-1].append(name)
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        _save(content(names), out / file, base_dir)
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum(tensor.numel() for tensor in expected.values()) * dtype.itemsize
        _write_json({"metadata": {"total_size": total}, "weight_map": places}, out / "model.safetensors.index.json")
    if lora is not None:
        settings = peft_config(causal, lora, targets)
        settings.inference_mode = True
        if peft_can_open(causal, settings):
            tensors = {f"base_model.model.{name}": tensor for name, tensor in adapters.read(list(adapters.expected)).items()}
            (out / ADAPTER_DIRECTORY).mkdir(exist_ok=True)
            _save(tensors, out / ADAPTER_DIRECTORY / "adapter_model.safetensors", base_dir)
            _write_json(settings.to_dict(), out / ADAPTER_DIRECTORY / "adapter_config.json")
        else:
            log.warning(
                "peft takes names of the adapted layers for those of %s's experts and could not open the adapter, so only the "
                "merged weights are exported.",
                type(causal).__name__,
            )
    _copy_settings(base_dir, out, dtype)


class _Stored:
    """Tensors in a DCP directory, found to be the `expected` ones."""

    def __init__(self, directory: Path, prefix: str, expected: dict[str, Tensor]) -> None:
        self.directory, self.prefix, self.expected = directory, prefix, expected
        stored = {name: entry for name, entry in stored_tensors(directory).items() if name.startswith(prefix)}
        if not stored:
            raise ModelError(f"{directory} holds no tensor whose name starts with {prefix!r}.")
        compare({prefix + name: tensor for name, tensor in expected.items()}, stored, directory, ignored=set(), cast=True)
        self._types = {name.removeprefix(prefix): entry.properties.dtype for name, entry in stored.items()}

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Some of them, in their stored types."""
        tensors = {name: torch.empty(self.expected[name].shape, dtype=self._types[name], device="cpu") for name in names}
        load_tensors({self.prefix + name: tensor for name, tensor in tensors.items()}, self.directory, strict=False, alone=True)
        return tensors


def _adapter_tensors(targets: dict[str, nn.Module], rank: int) -> dict[str, Tensor]:
    tensors = {}
    for name, layer in targets.items():
        assert isinstance(layer.weight, Tensor)
        first, second = layer.weight.shape
        outputs, inputs = (first, second) if isinstance(layer, nn.Linear) else (second, first)
        tensors[f"{name}.lora_A.weight"] = torch.empty(rank, inputs, device="meta")
        tensors[f"{name}.lora_B.weight"] = torch.empty(outputs, rank, device="meta")
    return tensors


def _save(tensors: dict[str, Tensor], path: Path, base_dir: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    shutil.copymode(base_dir / "config.json", path)  # safetensors makes it private


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, default=sorted, indent=2, sort_keys=True), encoding="utf-8")  # peft's sets: in order


def _copy_settings(base_dir: Path, out: Path, dtype: torch.dtype) -> None:
    for path in base_dir.iterdir():
        if path.is_file() and path.name not in NOT_COPIED and path.suffix != ".safetensors":
            shutil.copy2(path, out / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name; transformers opens a model in the type named here
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(config, out / "config.json")
