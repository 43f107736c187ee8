"""Which rank computes which response, and in what portions. The same responses are in a mini-batch on any number of ranks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.config import Config
from rl_core.rollout.batch import RolloutBatch


@dataclass(frozen=True)
class BatchPlan:
    """The resolved batch sizes of a run."""

    prompts: int
    """Prompts per step."""
    responses: int
    """Responses per step."""
    mini_batch: int
    """Responses per optimizer step, over all ranks."""
    micro_batch: int
    """Responses per forward and backward on one rank."""
    micro_tokens: int | None
    """Tokens per forward and backward on one rank instead, padding included."""
    ppo_epochs: int

    @classmethod
    def of(cls, config: Config) -> "BatchPlan":
        """The plan of a settled configuration."""
        return cls(
            prompts=config.samples_per_step // config.rollout.n,
            responses=config.samples_per_step,
            mini_batch=config.mini_batch_size,
            micro_batch=config.trainer.per_device_train_batch_size,
            micro_tokens=config.trainer.max_tokens_per_micro_batch,
            ppo_epochs=config.algorithm.ppo_epochs,
        )

    @property
    def mini_batches(self) -> int:
        """Mini-batches per pass over the rollouts."""
        return self.responses // self.mini_batch

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per PPO step."""
        return self.mini_batches * self.ppo_epochs

    def portions(self, batch: RolloutBatch, parts: int, part: int) -> list[Tensor]:
        """Row numbers of the micro-batches in which one of `parts` data-parallel ranks computes a batch.

        Each rank takes as many rows (one fewer where they do not divide); rows of like length are together, for less padding,
        and the longest come first, so that a lack of memory shows at once. All parts get the same number of micro-batches,
        some of them without rows where they do not divide: every rank runs the same collectives.
        """
        length = batch.prompt_length + batch.response_length
        order = torch.argsort(length, descending=True, stable=True).tolist()
        lengths = length.tolist()
        cut = [self._cut(order[index::parts], lengths) for index in range(parts)]
        most = max(map(len, cut))
        return [torch.tensor(rows, dtype=torch.long) for rows in cut[part]] + [torch.tensor([], dtype=torch.long)] * (
            most - len(cut[part])
        )

    def _cut(self, rows: list[int], lengths: list[int]) -> list[list[int]]:
        if self.micro_tokens is None:
            return [rows[start : start + self.micro_batch] for start in range(0, len(rows), self.micro_batch)]
        cut: list[list[int]] = []
        for row in rows:  # the first of a portion is its longest
            if cut and lengths[cut[-1][0]] * (len(cut[-1]) + 1) <= self.micro_tokens:
                cut[-1].append(row)
            else:
                cut.append([row])
        return cut

    def describe(self, parts: int) -> str:
        """The plan in words, for the log, where the actor's ranks divide the responses into `parts`."""
        rows = math.ceil(self.mini_batch / parts)
        micro = min(self.micro_batch, rows)
        portions = (
            f"{math.ceil(rows / micro)} micro-batch(es) of {micro}"
            if self.micro_tokens is None
            else f"micro-batches of at most {self.micro_tokens} tokens"
        )
        return (
            f"Batch plan: {self.prompts} prompts, {self.responses} responses a step; {self.mini_batches} mini-batch(es) of "
            f"{self.mini_batch} responses × {self.ppo_epochs} epoch(s) = {self.optimizer_steps} optimizer step(s); on each of "
            f"{parts} data-parallel rank(s) {rows} responses a mini-batch in {portions}"
        )
