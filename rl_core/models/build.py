"""Actor, critic and reference, all built alike: on the meta device, sharded, materialised, own shards loaded.

No rank ever holds a whole model: nothing is allocated before the parameters are sharded, and each rank reads only its
own rows of each tensor.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rl_core.checkpoint.dcp import load_safetensors, load_tensors
from rl_core.config.schema import Config
from rl_core.errors import ModelError
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import shard, unit_classes
from rl_core.models.tensors import model_tensors
from rl_core.models.value import ValueModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)


def build_policy(base_dir: Path, config: Config, device: torch.device, mesh: DeviceMesh, trainable: bool) -> PolicyModel:
    """The policy (actor or reference) with the weights of `base_dir`. Collective.

    Args:
        base_dir: a base artifact (`weights/`), or a Hugging Face directory of safetensors.
        mesh: one-dimensional, over all ranks.
        trainable: False freezes it (reference).

    Raises:
        ConfigError: `fsdp.fsdp_transformer_layer_cls_to_wrap` does not fit the model.
        ModelError: the weights do not fit config.json.
    """
    causal = empty_model(base_dir)
    module = PolicyModel(causal)
    _shard_and_materialise(module, causal, config, device, mesh)
    causal.tie_weights()
    _load(model_tensors(module), base_dir, set(causal.all_tied_weights_keys))
    return module.requires_grad_(trainable).eval()


def build_critic(base_dir: Path, config: Config, device: torch.device, mesh: DeviceMesh) -> ValueModel:
    """The critic: the backbone of `base_dir` and a value head of zeros. Collective; arguments as `build_policy`."""
    causal = empty_model(base_dir)
    module = ValueModel(causal.base_model)  # type: ignore[arg-type]
    _shard_and_materialise(module, causal, config, device, mesh)
    tensors = model_tensors(module)
    with torch.no_grad():
        for name in [name for name in tensors if name.startswith("value_head.")]:
            tensors.pop(name).zero_()
    prefix = f"{causal.base_model_prefix}."
    names = {name.replace("backbone.", prefix, 1): tensor for name, tensor in tensors.items()}
    _load(names, base_dir, {name for name in causal.state_dict() if not name.startswith(prefix)})
    return module.eval()


def empty_model(directory: Path) -> "PreTrainedModel":
    """The transformers model that config.json describes, float32, on the meta device (no memory, no values)."""
    from transformers import AutoConfig

    try:
        return empty_model_of(AutoConfig.from_pretrained(directory))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}/config.json: transformers cannot build this model ({error}).") from error


def empty_model_of(config: "PretrainedConfig") -> "PreTrainedModel":
    """As `empty_model`, of a transformers configuration. SDPA attention where the class has it, else its own."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        except ValueError:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def _shard_and_materialise(
    module: nn.Module, causal: "PreTrainedModel", config: Config, device: torch.device, mesh: DeviceMesh
) -> None:
    classes = unit_classes(causal, config.fsdp.fsdp_transformer_layer_cls_to_wrap)
    name = f"{type(module).__name__} of {type(causal).__name__}"
    report = shard(module, classes, config, mesh)
    if mesh.get_rank() == 0:
        log.info("%s: %s", name, report)
    module.to_empty(device=device)
    _restore_buffers(causal)


def _restore_buffers(causal: "PreTrainedModel") -> None:
    """Compute what no checkpoint stores (rotary frequencies, embedding scales) as transformers' `from_pretrained` does.

    A model class initialises such buffers in `_init_weights`, module by module; where that also touches weights they are
    loaded afterwards. NaN marks what it leaves out.
    """
    buffers = dict(causal.named_non_persistent_buffers())
    with torch.no_grad():
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        for name in {name.rpartition(".")[0] for name in buffers}:
            causal._init_weights(causal.get_submodule(name))
    if left := [name for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.isnan().any()]:
        raise ModelError(f"{type(causal).__name__} does not say how to compute its buffers {', '.join(left[:10])}.")


def _load(tensors: dict[str, torch.Tensor], base_dir: Path, superfluous: set[str]) -> None:
    """Fill `tensors` from a base artifact or a Hugging Face directory, which may hold the `superfluous` names too."""
    if (base_dir / "weights").is_dir():
        load_tensors(tensors, base_dir / "weights", ignored=superfluous, cast=True)
    else:
        load_safetensors(tensors, base_dir, ignored=superfluous)
