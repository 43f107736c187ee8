"""Which rank computes which response, and in what portions. The same responses are in a mini-batch on any number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_core.config import Config
from rl_core.rollout.batch import RolloutBatch


@dataclass(frozen=True)
class BatchPlan:
    """The resolved batch sizes of a run on `ranks` ranks."""

    prompts: int
    """Prompts per step."""
    responses: int
    """Responses per step."""
    mini_batch: int
    """Responses per optimizer step, over all ranks."""
    micro_batch: int
    """Responses per forward and backward on one rank."""
    ppo_epochs: int
    ranks: int

    @classmethod
    def of(cls, config: Config, ranks: int) -> "BatchPlan":
        """The plan that a config gives on a number of ranks."""
        rows = math.ceil(config.mini_batch_size / ranks)
        return cls(
            prompts=config.trainer.train_batch_size,
            responses=config.samples_per_step,
            mini_batch=config.mini_batch_size,
            micro_batch=min(config.trainer.per_device_train_batch_size, rows),
            ppo_epochs=config.algorithm.ppo_epochs,
            ranks=ranks,
        )

    @property
    def mini_batches(self) -> int:
        """Mini-batches per pass over the rollouts."""
        return self.responses // self.mini_batch

    @property
    def rows(self) -> int:
        """Rows of a mini-batch on one rank, zero-weight ones included: the same on every rank."""
        return math.ceil(self.mini_batch / self.ranks)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per PPO step."""
        return self.mini_batches * self.ppo_epochs

    def samples_of(self, rank: int, mini_batch: int) -> range:
        """The numbers, within the step, of the responses of a mini-batch that a rank generates and trains on."""
        start = mini_batch * self.mini_batch
        end = start + self.mini_batch
        return range(min(start + rank * self.rows, end), min(start + (rank + 1) * self.rows, end))

    def describe(self) -> str:
        """The plan in words, for the log."""
        accumulation = math.ceil(self.rows / self.micro_batch)
        return (
            f"Batch plan: {self.prompts} prompts, {self.responses} responses a step; {self.mini_batches} mini-batch(es) of "
            f"{self.mini_batch} responses × {self.ppo_epochs} epoch(s) = {self.optimizer_steps} optimizer step(s); on each of "
            f"{self.ranks} rank(s) {self.rows} responses a mini-batch in {accumulation} micro-batch(es) of {self.micro_batch}"
        )


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What one step's rollout gives to the updates; all tensors are [B, R] over the response tokens."""

    batch: RolloutBatch
    logprobs: Tensor
    """Of the policy that generated the responses."""
    ref_logprobs: Tensor | None
    """Of the reference policy; None where no KL is charged."""
    values: Tensor
    """Of the critic before the updates."""
    advantages: Tensor
    returns: Tensor

    def select(self, rows: Tensor) -> "Experience":
        """The given rows, as narrow as they allow."""
        part = self.batch.select(rows)
        columns = {field.name: getattr(self, field.name) for field in fields(self)} | {"batch": part}
        narrow = {name: value[rows, : part.width] for name, value in columns.items() if isinstance(value, Tensor)}
        return Experience(**columns | narrow)

    def mini_batches(self, plan: BatchPlan) -> "Iterator[Experience]":
        """This rank's part of each mini-batch, `ppo_epochs` times over."""
        rows = torch.arange(len(self.batch)).split(plan.rows)
        for _ in range(plan.ppo_epochs):
            yield from map(self.select, rows)

    def micro_batches(self, size: int) -> "list[Experience]":
        """Portions of at most `size` rows."""
        return [self.select(rows) for rows in by_length(self.batch, size)]


def by_length(batch: RolloutBatch, size: int) -> list[Tensor]:
    """Row numbers of portions of `size` rows, rows of like length together (less padding); longest first, so that a lack
    of memory shows at once."""
    order = torch.argsort(batch.prompt_length + batch.response_length, descending=True, stable=True)
    return list(order.split(size))
