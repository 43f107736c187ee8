"""The tensors of models and optimizers as flat dictionaries of names: what checkpoints store."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from rl_core.models.policy import PolicyModel

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, sharded as they are; of tied ones the first only.

    Names are those of the transformers causal language model for a policy, `backbone.…` and `value_head.…` for a critic.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    # FSDP's hook in state_dict registers the sharded parameters, which a forward may have left gathered.
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[_name(module, name)] = tensor
    return tensors


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments and step counts of AdamW, by parameter: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`.

    A parameter without state (a new optimizer, to load into) gets zeros first, as AdamW's first step would. The settings
    are not part: learning rate is a function of the step, the rest comes from the config.
    """
    assert isinstance(optimizer, AdamW), f"{type(optimizer).__name__} has other state than AdamW"
    names = {id(parameter): name for name, parameter in model_tensors(module).items() if parameter.requires_grad}
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        assert not group["amsgrad"], "amsgrad has a third moment"
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _name(module: nn.Module, name: str) -> str:
    name = name.replace("_checkpoint_wrapped_module.", "")
    return name.removeprefix("model.") if isinstance(module, PolicyModel) else name
