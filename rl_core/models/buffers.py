"""What no checkpoint stores of a model: the values that its constructor computes (rotary frequencies, embedding scales)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_core.models.lora import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def restore_buffers(model: "PreTrainedModel") -> None:
    """Fill the buffers that are not stored, and tensors that are plain attributes, of a model that was built on the meta device.

    They are computed as by anybody who calls the class: it is built once more, with parameters that have no memory. (For
    transformers' `from_pretrained`, `_init_weights` computes them; most models with code of their own do not know that.)

    Args:
        model: materialised; wrapping and adapters may have been added.
    """
    built = dict(_built(model).named_modules())
    device = next(model.parameters()).device
    with torch.no_grad():
        for name, module in model.named_modules():
            twin = built.get(plain_name(f"{name}.").removesuffix("."))
            if twin is None:  # an adapter's
                continue
            for key in module._non_persistent_buffers_set & twin._buffers.keys():
                if (buffer := module._buffers[key]) is not None:
                    buffer.copy_(twin._buffers[key])
            for key, value in vars(twin).items():
                if isinstance(value, Tensor) and not value.is_meta:
                    setattr(module, key, value.to(device))


def _built(model: "PreTrainedModel") -> nn.Module:
    """A model of the same class and configuration, with its parameters on the meta device and all else in memory."""
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    # FSDP makes a subclass of what it wraps.
    kind: Any = next(
        kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel) and not issubclass(kind, FSDPModule)
    )
    with no_init_weights(), _parameters_on_meta(), torch.device("cpu"):
        return kind._from_config(model.config, dtype=model.dtype)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within, each parameter loses its memory, untouched, when it is given to a module."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
