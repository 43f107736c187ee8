"""The tensors of models and optimizers as flat dictionaries of names: what is loaded, and what checkpoints store.

Names are those of the transformers causal language model for a policy, `backbone.…` and `value_head.…` for a critic. Adapters
are `….lora_A.weight` and `….lora_B.weight` beside the `….weight` that they adapt.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rl_core.models.lora import is_adapter, plain_name
from rl_core.models.policy import PolicyModel
from rl_core.optimizers import MOMENTS, AdamW8bit


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a base model's weights fill (and a value head): parameters and persistent buffers, sharded as they are, of tied ones
    the first only; without adapters."""
    return {name: tensor for name, tensor in _all_tensors(module).items() if not is_adapter(name)}


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What training changes, so what its checkpoints hold: adapters and value head where there are adapters, else all."""
    tensors = _all_tensors(module)
    if not any(is_adapter(name) for name in tensors):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name) or name.startswith("value_head.")}


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments and step counts by parameter: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`.

    A parameter without state (a new optimizer, to load into) gets zeros first, as AdamW's first step would. The settings
    are not part: learning rate is a function of the step, the rest comes from the config. Moments held in 8 bits become
    float32 until the next step, or until `rl_core.optimizers.compress`, which is called when these have been saved or loaded.
    """
    names = {id(parameter): name for name, parameter in trained_tensors(module).items() if parameter.requires_grad}
    if isinstance(optimizer, AdamW8bit):
        optimizer.expand()
    else:
        assert isinstance(optimizer, AdamW), f"{type(optimizer).__name__} has other state than AdamW"
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        assert not group.get("amsgrad"), "amsgrad has a third moment"
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                on_device = group["capturable"] or group["fused"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            name = names.pop(id(parameter))
            tensors |= {f"{name}.{key}": state[key] for key in ("step", *MOMENTS)}
    assert not names, f"the optimizer lacks the parameters {sorted(names.values())[:10]}"
    return tensors


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    # FSDP's hook in state_dict registers the sharded parameters, which a forward may have left gathered.
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[_name(module, name)] = tensor
    return tensors


def _name(module: nn.Module, name: str) -> str:
    name = plain_name(name)
    return name.removeprefix("model.") if isinstance(module, PolicyModel) else name
