"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft: W + alpha/rank · B·A, of which only A and B are trained.

peft puts a layer of its own around each adapted one, so its parameters are called `….base_layer.weight`,
`….lora_A.default.weight` [rank, in] and `….lora_B.default.weight` [out, rank]. Everywhere else, in checkpoints too, the base
weight keeps its plain name and the adapters are `….lora_A.weight` and `….lora_B.weight`: peft's names in files.
"""

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_core.config.roles import LoraConfig
from rl_core.config.schema import Role
from rl_core.errors import ConfigError
from rl_core.models.local import local

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""What peft calls the only adapter in its parameters' names."""


def add_adapters(causal: "PreTrainedModel", settings: LoraConfig, role: Role = "actor") -> None:
    """Put adapters around linear layers, in place, on the meta device, before sharding; the other parameters are frozen.

    Adapters are float32 whatever type the base is in.

    Raises:
        ConfigError: `target_modules` names no linear layer, or peft is missing.
    """
    where = f"{role}.lora"
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"{where} needs the package peft, which cannot be imported ({error}). Install it: pip install peft "
            "(the extra `lora`)."
        ) from None
    targets = target_layers(causal, settings, where)
    # In a module that is no transformers model peft takes names as they are (see `peft_can_open`).
    with torch.device("meta"):
        peft.inject_adapter_in_model(peft_config(causal, settings, targets), nn.ModuleDict({"causal": causal}), ADAPTER)
    added = adapted_layers(causal)
    assert added.keys() == set(targets), f"peft adapted {sorted(added.keys() ^ set(targets))[:10]} otherwise than asked"
    for layer in added.values():
        layer.lora_A.float()
        layer.lora_B.float()


def target_layers(causal: "PreTrainedModel", settings: LoraConfig, where: str = "actor.lora") -> dict[str, nn.Module]:
    """The linear layers that get an adapter, by name: never the output head, whose weight may be the embedding's.

    Args:
        where: configuration section, for messages.

    Raises:
        ConfigError: a name in `target_modules` is that of no linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    head = causal.get_output_embeddings()
    # Subclasses are left out: a router that is a Linear returns something else than one.
    linear = {
        name: module for name, module in causal.named_modules() if type(module) in (nn.Linear, Conv1D) and module is not head
    }
    wanted = settings.target_modules
    if wanted == "all-linear":
        if not linear:
            raise ConfigError(f"{where}.target_modules: {type(causal).__name__} has no linear layer to adapt.")
        return linear
    absent = [target for target in wanted if not any(_is(name, target) for name in linear)]
    if absent or not wanted:
        candidates = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"{where}.target_modules: {type(causal).__name__} has no linear layer named {', '.join(absent) or '(none given)'} "
            f"(the output head does not count). Take from: {', '.join(candidates)}; or all-linear."
        )
    return {name: module for name, module in linear.items() if any(_is(name, target) for target in wanted)}


def peft_config(causal: "PreTrainedModel", settings: LoraConfig, targets: dict[str, nn.Module]) -> Any:
    """The settings as peft's own configuration, which names `targets` by their last part where that says the same."""
    import peft

    short = {name.rpartition(".")[2] for name in targets}
    meant = {name for name, _ in causal.named_modules() if any(_is(name, target) for target in short)}
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it, so any number will do
        target_modules=sorted(short if meant == targets.keys() else targets),
        fan_in_fan_out=any(not isinstance(module, nn.Linear) for module in targets.values()),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def peft_can_open(causal: "PreTrainedModel", settings: Any) -> bool:
    """Whether peft, opening an adapter with this configuration, adapts the same layers.

    In some mixtures of experts it takes the names of shared experts' or dense layers' projections for those of the experts, which
    transformers 5 has fused.
    """
    from copy import deepcopy

    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    understood = deepcopy(settings)
    try:
        convert_peft_config_for_transformers(understood, causal, conversions=None)
    except ValueError:  # not all of the names that have become one are there
        return False
    return not understood.target_parameters


def is_adapter(parameter_name: str) -> bool:
    """Whether a parameter (under its name in the module or in a checkpoint) belongs to an adapter."""
    return not {"lora_A", "lora_B"}.isdisjoint(parameter_name.split("."))


def plain_name(parameter_name: str) -> str:
    """A parameter's or module's name without what peft's layers and activation checkpointing add to it."""
    name = parameter_name.replace("_checkpoint_wrapped_module.", "")
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.weight", ".weight")


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """peft's layers by their names in `module`: `.base_layer`, `.lora_A`, `.lora_B`, `.scaling`, `.fan_in_fan_out`."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")}


@torch.no_grad()
def initialise(module: nn.Module) -> bool:
    """Give adapters their first values, as peft does: A uniform within ±1/√in, B zero.

    Each A is drawn whole from a generator that its name seeds, and each rank keeps its part: the values are the same on any
    number of ranks and whatever else has been drawn.

    Returns:
        Whether there are adapters.
    """
    found = False
    for name, parameter in module.named_parameters():
        if not is_adapter(name):
            continue
        found = True
        if "lora_B" in name:
            local(parameter).zero_()
            continue
        seed = hashlib.sha256(plain_name(name).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        bound = 1 / math.sqrt(parameter.shape[1])
        whole = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        local(parameter).copy_(whole)
    return found


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """W + scaling · B·A in float32.

    Args:
        weight: [out, in], or [in, out] of a transposed layer (GPT-2's Conv1D).
        lora_a: [rank, in].
        lora_b: [out, rank].
        scaling: alpha / rank.
    """
    update = lora_b.float() @ lora_a.float()
    return torch.add(weight.float(), update.T if transposed else update, alpha=scaling)


def _is(name: str, target: str) -> bool:
    """peft's rule."""
    return name == target or name.endswith(f".{target}")
