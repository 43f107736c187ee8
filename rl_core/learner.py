"""A model in training: gradients are summed over micro-batches and ranks, clipped, applied; bad ones are not applied."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rl_core.config import Config
from rl_core.distributed import World
from rl_core.errors import NonFiniteError

MOST_SKIPPED = 3
"""So many optimizer steps in a row may be skipped for non-finite gradients before the run is stopped."""


class Learner:
    """A module sharded by `fully_shard`, its AdamW and its learning rate."""

    def __init__(self, name: str, module: Any, learning_rate: float, config: Config, world: World) -> None:
        trainer = config.trainer
        self.name = name
        self.module = module
        self.skipped = 0
        """Optimizer steps skipped in a row."""
        self._rate, self._warmup, self._max_norm = learning_rate, trainer.warmup_steps, trainer.max_grad_norm
        self._world = world
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=learning_rate,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=trainer.adam_epsilon,
            weight_decay=trainer.weight_decay,
            foreach=True,
        )

    def learning_rate(self, optimizer_step: int) -> float:
        """Linear warm-up, then constant: a function of the number of optimizer steps before this one."""
        return self._rate * min(1.0, (optimizer_step + 1) / self._warmup) if self._warmup else self._rate

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add a micro-batch's gradient of a loss that is already divided by the global number of tokens.

        Args:
            loss: scalar.
            last: of the mini-batch; only then gradients are summed over the ranks.
        """
        self.module.set_requires_gradient_sync(last)
        (loss * self._world.size).backward()  # FSDP averages over ranks; the loss is a part of a global mean

    def step(self, optimizer_step: int) -> dict[str, float]:
        """Clip, apply and clear the gradients.

        Raises:
            NonFiniteError: gradients were not finite several times in a row.
        """
        rate = self.learning_rate(optimizer_step)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.skipped = 0
        else:
            self.skipped += 1
        culprit = self._first_non_finite() if self.skipped >= MOST_SKIPPED else None
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped >= MOST_SKIPPED:
            raise NonFiniteError(
                f"The gradients of the {self.name} were not finite {self.skipped} times in a row, first in {culprit}. Nothing of "
                "that was applied or saved. Lower its learning rate, or compute in float32 (model.torch_dtype)."
            )
        return {"grad_norm": grad_norm, "lr": rate, "skipped": float(not math.isfinite(grad_norm))}

    def _first_non_finite(self) -> str:
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local is not None and not torch.isfinite(local).all():
                return name
        return "another rank's shard"
