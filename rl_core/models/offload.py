"""What is kept in host memory while a GPU does not need it: parameters, the optimizer's moments, activations.

On a CPU there is nowhere to go: all of this does nothing there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rl_core.config.fsdp import FsdpConfig
from rl_core.models.local import local

SMALLEST = 2**16
"""Bytes below which an activation stays on the device: the copy would take longer than its memory is worth."""

Runner = Callable[..., Any]


def home_device(settings: FsdpConfig, device: torch.device) -> torch.device:
    """Where the parameters are at rest, and so where `to_empty` puts them: `offload_policy` keeps them in host memory."""
    return torch.device("cpu") if settings.offload_policy else device


class Offload:
    """Keeps a role's parameters and moments in host memory, except within `loaded`.

    From the start: constructed, the module's parameters leave the device. Gradients go with their parameters. Buffers stay.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, settings: FsdpConfig, device: torch.device
    ) -> None:
        """
        Args:
            module: sharded by `fully_shard` and materialised.
            optimizer: its state may be empty; None for a frozen role.
            device: that computes.
        """
        # With offload_policy FSDP2 itself keeps everything in host memory, always.
        moves = device.type != "cpu" and not settings.offload_policy
        self._device = device
        self._movers: dict[str, Callable[[torch.device], None]] = {}
        self._users = {"parameters": 0, "moments": 0}
        if moves and settings.param_offload:
            self._movers["parameters"] = partial(_move_parameters, module)
        if moves and settings.optimizer_offload and optimizer is not None:
            self._movers["moments"] = partial(_move_moments, optimizer)
        self._move("parameters", "moments", to=torch.device("cpu"))

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        """Parameters (and with `optimizer` the moments) are on the device within the block. Blocks may nest."""
        wanted = ["parameters", "moments"] if optimizer else ["parameters"]
        self._move(*(what for what in wanted if not self._users[what]), to=self._device)
        for what in wanted:
            self._users[what] += 1
        try:
            yield
        finally:
            for what in wanted:
                self._users[what] -= 1
            self._move(*(what for what in wanted if not self._users[what]), to=torch.device("cpu"))

    def _move(self, *whats: str, to: torch.device) -> None:
        movers = [self._movers[what] for what in whats if what in self._movers]
        for move in movers:
            move(to)
        if movers and to.type == "cpu":
            torch.cuda.synchronize(self._device)  # the copies are asynchronous, and the CPU may read them next


def layer_runner(settings: FsdpConfig) -> Runner | None:
    """How a layer is called, `(layer, *args, **kwargs)`, so that it keeps less on the device between forward and backward.

    None where it keeps all its activations there. With checkpointing and offload together only the layer's input is kept,
    in host memory.
    """
    recomputed: Runner = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if settings.activation_cpu_offload:
        return partial(_run_offloaded, recomputed if settings.activation_checkpointing else None)
    return recomputed if settings.activation_checkpointing else None


def _run_offloaded(inner: Runner | None, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(partial(_pack, layer), _unpack):
        return layer(*args, **kwargs) if inner is None else inner(layer, *args, **kwargs)


def _pack(layer: nn.Module, tensor: Tensor) -> tuple[Tensor, torch.device | None]:
    if tensor.device.type == "cpu" or tensor.nbytes < SMALLEST or _is_weight(layer, tensor):
        return tensor, None
    return _to_host(tensor), tensor.device


def _unpack(packed: tuple[Tensor, torch.device | None]) -> Tensor:
    tensor, device = packed
    return tensor if device is None else tensor.to(device, non_blocking=True)


def _is_weight(layer: nn.Module, tensor: Tensor) -> bool:
    """Whether it is a (gathered) parameter or a view of one: FSDP frees and gathers those itself."""
    storage = tensor.untyped_storage().data_ptr()
    return any(
        parameter.untyped_storage().data_ptr() == storage
        for parameter in layer.parameters()
        if not isinstance(parameter, DTensor)
    )


def _move_parameters(module: nn.Module, to: torch.device) -> None:
    """`module.to(to)`, into pinned memory. FSDP2's override of `_apply` frees gathered parameters first and takes note of the
    new shards afterwards; parameters stay the objects that the optimizer knows, tied ones stay tied."""
    module._apply(lambda tensor: _moved(tensor, to) if isinstance(tensor, DTensor) else tensor)


def _move_moments(optimizer: torch.optim.Optimizer, to: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():  # a step count is where the optimizer wants it
                state[name] = _moved(value, to)


def _moved(tensor: Tensor, to: torch.device) -> Tensor:
    if tensor.device.type == to.type:
        return tensor
    return _to_host(tensor) if to.type == "cpu" else tensor.to(to, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, in the order of the current stream: later work there may reuse the device's memory."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    with torch.no_grad():
        local(copy).copy_(local(tensor), non_blocking=True)
    return copy
