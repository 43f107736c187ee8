"""Actor, critic and reference, all built alike: on the meta device, sharded, materialised, own shards loaded.

No rank ever holds a whole model: nothing is allocated before the parameters are sharded, and each rank reads only its
own rows of each tensor.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from rl_core.checkpoint.dcp import load_safetensors, load_tensors
from rl_core.config.model import ModelConfig, PretrainedModel
from rl_core.config.roles import TrainedRoleConfig
from rl_core.config.schema import Config, Role
from rl_core.errors import ModelError
from rl_core.groups import Group
from rl_core.models import lora, ulysses
from rl_core.models.auto import model_config, model_of
from rl_core.models.buffers import restore_buffers
from rl_core.models.dtypes import usable_dtype
from rl_core.models.offload import home_device
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import settle_buffers, shard, unit_classes
from rl_core.models.tensors import model_tensors
from rl_core.models.value import ValueModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)


def build_policy(base_dir: Path, config: Config, role: Role, group: Group, device: torch.device, trainable: bool) -> PolicyModel:
    """The policy (actor or reference) with the weights of `base_dir`. Collective over the group.

    Args:
        base_dir: a base artifact (`weights/`), or a Hugging Face directory of safetensors.
        role: whose settings count.
        trainable: False freezes it.

    Raises:
        ConfigError: `fsdp.wrap_policy` does not fit the model.
        ModelError: the weights do not fit config.json.
    """
    causal = empty_model(base_dir, config.model, _held_in(config, role, device, trainable))
    module = PolicyModel(causal, group)
    spread(module, causal, config, role, group, device, trainable)
    causal.tie_weights()
    _load(model_tensors(module), base_dir, set(causal.all_tied_weights_keys), group)
    return finish(module, trainable)


def build_critic(base_dir: Path, config: Config, group: Group, device: torch.device) -> ValueModel:
    """The critic: the backbone of `base_dir` and a value head of zeros. Collective; arguments as `build_policy`."""
    causal = empty_model(base_dir, config.model, _held_in(config, "critic", device, trainable=True))
    module = ValueModel(causal.base_model, group)  # type: ignore[arg-type]
    spread(module, causal, config, "critic", group, device, trainable=True)
    tensors = model_tensors(module)
    with torch.no_grad():
        for name in [name for name in tensors if name.startswith("value_head.")]:
            tensors.pop(name).zero_()
    prefix = f"{causal.base_model_prefix}."
    names = {name.replace("backbone.", prefix, 1): tensor for name, tensor in tensors.items()}
    _load(names, base_dir, {name for name in causal.state_dict() if not name.startswith(prefix)}, group)
    return finish(module, trainable=True)


def empty_model(
    directory: Path, settings: PretrainedModel, dtype: torch.dtype = torch.float32, kind: str = "AutoModelForCausalLM"
) -> "PreTrainedModel":
    """The transformers model that config.json describes, on the meta device (no memory, no values).

    Args:
        settings: whether code of its own may run, and the attention.
        kind: transformers' Auto class.

    Raises:
        ModelError: see `rl_core.models.auto`; or the class does not tell backbone and head apart.
    """
    trusted, section = settings.trust_remote_code, "model" if isinstance(settings, ModelConfig) else "reward"
    config = model_config(directory, trusted, section=section)
    with torch.device("meta"):
        model = model_of(config, dtype, attention=settings.attn_implementation, trusted=trusted, kind=kind, section=section)
    if model.base_model is model:
        raise ModelError(
            f"{section}.name_or_path: {type(model).__name__} does not name its backbone (base_model_prefix), without which it "
            "cannot be trained."
        )
    return model


def _held_in(config: Config, role: Role, device: torch.device, trainable: bool) -> torch.dtype:
    """The type of the parameters: master weights, or what a frozen model (adapters around it or not) computes in."""
    own = config.role(role)
    if trainable and not (isinstance(own, TrainedRoleConfig) and own.lora is not None):
        return getattr(torch, config.fsdp_of(role).master_dtype)
    return usable_dtype(config, role, device)


def spread(
    module: nn.Module, causal: "PreTrainedModel", config: Config, role: Role, group: Group, device: torch.device, trainable: bool
) -> None:
    """Add adapters, share sequences, shard over the group's mesh, and give every tensor memory (no values but buffers yet)."""
    settings, own = config.fsdp_of(role), config.role(role)
    if trainable and isinstance(own, TrainedRoleConfig) and own.lora is not None:
        lora.add_adapters(causal, own.lora, role)
    if group.sequence_group is not None:
        ulysses.enable(causal, group.sequence_group)
    classes = unit_classes(causal, settings.wrap_policy)
    report = shard(module, classes, settings, usable_dtype(config, role, device), group.mesh)
    if group.rank == 0:
        log.info("%s (%s): %s", role, type(causal).__name__, report)
    module.to_empty(device=home_device(settings, device))
    restore_buffers(causal)
    settle_buffers(module, settings, device)


def finish(module: Module, trainable: bool) -> Module:
    """After the weights are loaded: adapters begin, what is trained needs gradients, all else is frozen."""
    adapted = lora.initialise(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable and (not adapted or lora.is_adapter(name) or name.startswith("value_head.")))
    return module.eval()


def _load(tensors: dict[str, torch.Tensor], base_dir: Path, superfluous: set[str], group: Group) -> None:
    """Fill `tensors` from a base artifact or a Hugging Face directory, which may hold the `superfluous` names too."""
    if (base_dir / "weights").is_dir():
        load_tensors(tensors, base_dir / "weights", ignored=superfluous, cast=True, process_group=group.process_group)
    else:
        load_safetensors(tensors, base_dir, ignored=superfluous, process_group=group.process_group)
