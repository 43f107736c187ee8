"""A stored policy → a Hugging Face directory that `AutoModelForCausalLM.from_pretrained` opens.

One process and no collectives: rank 0 of a training can do it while the others wait elsewhere. At most one output file's
tensors are in memory.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from rl_core.checkpoint.dcp import load_tensors, stored_tensors
from rl_core.errors import ModelError

SHARD_BYTES = 2 * 10**9
NOT_COPIED = {"aliases.json", "manifest.json", "config.json", "model.safetensors.index.json"}


def export_policy(weights: Path, prefix: str, base_dir: Path, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config, tokenizer and safetensors of a policy into the directory `out`.

    Args:
        weights: tensor directory: of a checkpoint (`…/step_000010/tensors`), or of a base artifact (`…/weights`).
        prefix: of the policy's names in it: `actor.` or empty.
        base_dir: base artifact, for configuration and tokenizer.
        out: made where missing.
        dtype: type of the exported weights.

    Raises:
        ModelError: nothing has that prefix.
        BrokenArtifact: `weights` cannot be read.
    """
    stored = {name: entry for name, entry in stored_tensors(weights).items() if name.startswith(prefix)}
    if not stored:
        raise ModelError(f"{weights} holds no tensor whose name starts with {prefix!r}.")
    out.mkdir(parents=True, exist_ok=True)
    files: list[list[str]] = [[]]
    size = 0
    for name, entry in stored.items():
        size += entry.size.numel() * dtype.itemsize
        if files[-1] and size > SHARD_BYTES:
            files.append([])
            size = entry.size.numel() * dtype.itemsize
        files[-1].append(name)
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        load_tensors(tensors, weights, strict=False, alone=True)
        content = {name.removeprefix(prefix): tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(content, out / file, metadata={"format": "pt"})
        shutil.copymode(base_dir / "config.json", out / file)  # safetensors makes it private
        places |= dict.fromkeys(content, file)
    if len(files) > 1:
        total = sum(entry.size.numel() for entry in stored.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    _copy_settings(base_dir, out, dtype)


def _copy_settings(base_dir: Path, out: Path, dtype: torch.dtype) -> None:
    for path in base_dir.iterdir():
        if path.is_file() and path.name not in NOT_COPIED and path.suffix != ".safetensors":
            shutil.copy2(path, out / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name; transformers opens a model in the type named here
    config["dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
