"""A model in training: gradients are summed over micro-batches and ranks, clipped, applied; bad ones are not applied."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rl_core.config import Config
from rl_core.config.roles import TrainedRoleConfig
from rl_core.config.schema import Role as RoleName
from rl_core.errors import NonFiniteError
from rl_core.groups import Group
from rl_core.models.dtypes import usable_dtype
from rl_core.optimizers import make_optimizer
from rl_core.role import Role

MOST_SKIPPED = 3
"""So many optimizer steps in a row may be skipped for non-finite gradients before the run is stopped."""
FIRST_SCALE, MOST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2.0**24, 2000
"""Of the loss scale in float16, as in `torch.amp.GradScaler`."""


class Learner(Role):
    """A role with its optimizer and its learning rate.

    Attributes:
        optimizer: None on ranks that have no part in the role.
        skipped: optimizer steps skipped in a row for gradients that were not finite.
        scale: factor of the loss, so that small gradients do not vanish in float16 (Micikevicius et al. 2018,
            arXiv:1710.03740); None in other types.
        scaled_steps: optimizer steps since it was changed.
    """

    def __init__(
        self, name: RoleName, module: Any, group: Group, config: Config, device: torch.device, optimizer_steps: int
    ) -> None:
        settings = config.role(name)
        assert isinstance(settings, TrainedRoleConfig)
        self.settings, self._optimizer_steps = settings, optimizer_steps
        self.optimizer = None
        if module is not None:
            self.optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad], settings)
        super().__init__(name, module, group, config, device, self.optimizer)
        self._reshards = config.fsdp_of(name).reshard_after_forward
        self.skipped = self.scaled_steps = 0
        self.scale = FIRST_SCALE if usable_dtype(config, name, device) is torch.float16 else None

    def learning_rate(self, optimizer_step: int) -> float:
        """A function of the number of optimizer steps before this one: linear warm-up, then constant or falling to
        `min_lr_ratio` at the last one, along a line or a half cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)."""
        settings, warmup = self.settings, self.settings.warmup_steps
        if optimizer_step < warmup:
            return settings.learning_rate * (optimizer_step + 1) / warmup
        if settings.lr_scheduler_type == "constant":
            return settings.learning_rate
        done = min(1.0, (optimizer_step - warmup) / max(1, self._optimizer_steps - 1 - warmup))
        left = 1 - done if settings.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
        return settings.learning_rate * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's gradient of a loss that is already divided by the global number of tokens.

        Args:
            loss: scalar.
            last: of the mini-batch; only then gradients are summed over the ranks.
        """
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last or self._reshards)  # else gathered once for all micro-batches
        (
            loss * (self.group.size * (self.scale or 1.0))
        ).backward()  # FSDP averages over ranks; the loss is a part of a global mean

    def step(self, optimizer_step: int) -> dict[str, float]:
        """Clip, apply and clear the gradients.

        Raises:
            NonFiniteError: gradients were not finite several times in a row.
        """
        assert self.optimizer is not None
        rate = self.learning_rate(optimizer_step)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.scale is not None:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1 / self.scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = math.isfinite(grad_norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        counts = not finite and (self.scale or 1.0) <= 1.0  # above, it is the scale that was too high
        self.skipped = self.skipped + 1 if counts else 0
        culprit = self._first_non_finite() if self.skipped >= MOST_SKIPPED else None
        self._adapt_scale(finite)
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped >= MOST_SKIPPED:
            raise NonFiniteError(
                f"The gradients of the {self.name} were not finite {self.skipped} times in a row, first in {culprit}. Nothing of "
                "that was applied or saved. Lower its learning rate, or compute in float32 (model.torch_dtype)."
            )
        return {"lr": rate, "skipped": float(not finite)} | ({"grad_norm": grad_norm} if finite else {})

    @property
    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps beside the tensors."""
        return {"skipped": self.skipped, "scale": self.scale, "scaled_steps": self.scaled_steps}

    def restore(self, state: dict[str, float | None]) -> None:
        """Take over the `state` of a checkpoint; where it was made in another type, the scale starts anew."""
        self.skipped = int(state["skipped"] or 0)
        if self.scale is not None and state["scale"] is not None:
            self.scale, self.scaled_steps = state["scale"], int(state["scaled_steps"] or 0)

    def _adapt_scale(self, finite: bool) -> None:
        if self.scale is None:
            return
        self.scaled_steps = self.scaled_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.scaled_steps == STEPS_TO_DOUBLE:
            self.scale, self.scaled_steps = min(MOST_SCALE, self.scale * 2), 0

    def _first_non_finite(self) -> str:
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local is not None and not torch.isfinite(local).all():
                return name
        return "another rank's shard"
