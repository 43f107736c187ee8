"""AdamW as torch has it, and with its moments in 8 bits.

The 8-bit one is written here because of what the packages for it lack: bitsandbytes knows no sharded parameters, torchao
compiles its step on the spot, and with both a checkpoint in floats does not give the same codes again.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from rl_core.models.local import local

if TYPE_CHECKING:
    from rl_core.config.roles import TrainedRoleConfig

BLOCK = 256
"""Elements that share a scale, as in bitsandbytes and torchao."""
FEWEST = 4096
"""Smaller parameters and those of one dimension keep float32 moments, as in bitsandbytes: they are no memory."""
CHUNK_ELEMENTS = 2**24
"""So many elements of a parameter are in float32 at a time: 64 MiB for each intermediate result."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: Iterable[nn.Parameter], settings: "TrainedRoleConfig") -> Optimizer:
    """The configured optimizer of `parameters`, which may be FSDP2 DTensors."""
    betas = (settings.adam_beta1, settings.adam_beta2)
    if settings.optimizer == "adamw8bit":
        return AdamW8bit(parameters, settings.learning_rate, betas, settings.adam_epsilon, settings.weight_decay)
    parameters = list(parameters)
    # On a GPU fused: foreach holds copies as large as the model while it steps. On the CPU foreach is as fast, and results are
    # compared bit by bit there.
    fused = {"fused": True} if parameters and parameters[0].is_cuda else {"foreach": True}
    return AdamW(parameters, settings.learning_rate, betas, settings.adam_epsilon, settings.weight_decay, **fused)


def compress(optimizer: Optimizer) -> None:
    """After `optimizer_tensors` were saved or loaded: hold 8-bit moments in 8 bits again, now and not at the next step."""
    if isinstance(optimizer, AdamW8bit):
        optimizer.compress()


class AdamW8bit(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with moments in block-wise dynamic 8-bit codes (Dettmers et al.
    2022, arXiv:2110.02861).

    Apart from the paper: of the second moment the square root is coded, so that gradients of a ten-thousandth of the largest in
    their block still have one; the codes are symmetric, so that what is decoded is coded the same again; and blocks lie
    within a row (first dimension), which FSDP2 never divides: the update does not depend on the number of ranks.

    The state of a parameter is `step` and for each moment either NAME, float32 and sharded like the parameter (small ones, and
    between `expand` and `compress`), or `NAME.codes` (uint8) and `NAME.scales` (float32 [rows, blocks]) of this rank's rows.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._prepare(parameter)
                    self._update(parameter, parameter.grad, group)

    @torch.no_grad()
    def expand(self) -> None:
        """Hold all moments in float32, as AdamW names them: to be saved, or loaded into. Zeros where there is no state yet."""
        for parameter in self._parameters():
            state = self.state[parameter]
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
            for name in MOMENTS:
                if name in state:
                    continue
                whole = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
                if f"{name}.codes" in state:
                    codes, scales = state.pop(f"{name}.codes"), state.pop(f"{name}.scales")
                    whole = whole.to(codes.device)  # which is another than the parameter's while the moments are offloaded
                    for part in _chunks(codes):
                        _rows(local(whole))[part] = _decoded(codes[part], scales[part], signed=name == "exp_avg")
                state[name] = whole

    @torch.no_grad()
    def compress(self) -> None:
        """The opposite of `expand`."""
        for parameter in self._parameters():
            if self.state[parameter]:
                self._prepare(parameter)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _prepare(self, parameter: nn.Parameter) -> None:
        """Make state where there is none, and codes of floats where there should be codes."""
        state = self.state[parameter]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        small = parameter.dim() < 2 or parameter.numel() < FEWEST
        for name in MOMENTS:
            if small and name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
            elif not small and f"{name}.codes" not in state:
                known = state.pop(name, None)
                rows = _rows(local(parameter if known is None else known))
                codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
                scales = torch.empty(len(rows), -(-rows.shape[1] // BLOCK), dtype=torch.float32, device=rows.device)
                for part in _chunks(rows):
                    values = torch.zeros_like(rows[part], dtype=torch.float32) if known is None else rows[part]
                    codes[part], scales[part] = _coded(values, signed=name == "exp_avg")
                state |= {f"{name}.codes": codes, f"{name}.scales": scales}

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        step = float(state["step"])
        rate, root = group["lr"] / (1 - beta1**step), (1 - beta2**step) ** 0.5
        weights, gradients = _rows(local(parameter)), _rows(local(gradient))
        for part in _chunks(weights):
            fresh = gradients[part].float()
            first = _read(state, "exp_avg", part).lerp(fresh, 1 - beta1)
            second = (_read(state, "exp_avg_sq", part) * beta2).addcmul_(fresh, fresh, value=1 - beta2)
            _write(state, "exp_avg", part, first)
            _write(state, "exp_avg_sq", part, second)
            weight = weights[part].float() * (1 - group["lr"] * group["weight_decay"])
            weights[part] = weight.addcdiv_(first, (second.sqrt_() / root).add_(group["eps"]), value=-rate)


def _rows(tensor: Tensor) -> Tensor:
    """A view [rows, elements of a row]; of one dimension: one row."""
    return tensor.view(len(tensor), -1) if tensor.dim() > 1 and len(tensor) else tensor.view(1, -1)


def _chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(rows.shape[1], 1))
    return (slice(start, start + step) for start in range(0, len(rows) if rows.numel() else 0, step))


def _read(state: dict[str, Tensor], name: str, part: slice) -> Tensor:
    if name in state:
        return _rows(local(state[name]))[part]
    return _decoded(state[f"{name}.codes"][part], state[f"{name}.scales"][part], signed=name == "exp_avg")


def _write(state: dict[str, Tensor], name: str, part: slice, values: Tensor) -> None:
    if name in state:
        _rows(local(state[name]))[part] = values
    else:
        state[f"{name}.codes"][part], state[f"{name}.scales"][part] = _coded(values, signed=name == "exp_avg")


def _coded(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, m] and scales [n, blocks] of float32 [n, m]."""
    count, width = values.shape
    blocks = functional.pad(values if signed else values.sqrt(), (0, -width % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(-1)
    levels = _levels(signed, values.device)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return codes.view(count, -1)[:, :width].to(torch.uint8), scales


def _decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Float32 [n, m]."""
    count, width = codes.shape
    levels = functional.pad(_levels(signed, codes.device)[codes.int()], (0, -width % BLOCK))
    values = (levels.view(count, -1, BLOCK) * scales[..., None]).view(count, -1)[:, :width]
    return values if signed else values.square()


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """The values of the codes, in ascending order: 0, 1 (and -1), and in each decade down to 1e-6 half as many, evenly spaced
    (the paper's dynamic type)."""
    levels = [0.0, 1.0]
    for decade in range(signed, 7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        levels += ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
    if signed:
        levels += [-level for level in levels if level]
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)
