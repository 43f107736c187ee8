"""The largest micro-batch that can come, tried before the first step, so that a lack of memory shows now and not hours in."""

import math
from collections.abc import Iterable

import torch

from rl_core import stall
from rl_core.batching import BatchPlan
from rl_core.config import Config
from rl_core.learner import Learner
from rl_core.models.tensors import optimizer_tensors
from rl_core.optimizers import compress
from rl_core.phases import inputs
from rl_core.rollout.batch import PAD_ID, RolloutBatch


def try_largest_batch(
    learners: Iterable[Learner], plan: BatchPlan, prompt: int, response: int, config: Config, device: torch.device
) -> None:
    """Forward and backward of each beside its optimizer's moments, twice where gradients of one micro-batch wait for those of
    another. Changes nothing. Collective over each role.

    Args:
        prompt, response: tokens of the longest that can come.
        device: on which the models compute.

    Raises:
        torch.OutOfMemoryError: it does not fit; `rl_core.entry` says what needs less.
    """
    mine = [(learner, learner.optimizer) for learner in learners if learner.optimizer is not None]
    for learner, optimizer in mine:  # of all, before any is tried: the one is updated beside the moments of the other
        with learner.loaded(optimizer=True):
            optimizer_tensors(learner.module, optimizer)
            compress(optimizer)
    for learner, optimizer in mine:
        share = math.ceil(plan.mini_batch / learner.group.data_parallel)
        rows = plan.micro_batch if plan.micro_tokens is None else max(1, plan.micro_tokens // (prompt + response))
        rows = min(rows, share)
        batch = RolloutBatch.from_lists(
            [[PAD_ID] * prompt] * rows,
            [[PAD_ID] * response] * rows,
            [[0.0] * response] * rows,
            [True] * rows,
            list(range(rows)),
            device,
        )
        with stall.phase(f"trying the largest batch of the {learner.name}"), learner.loaded(optimizer=True):
            for last in (False, True) if rows < share else (True,):
                learner.backward(_sum(learner, batch, config) * 0.0, last)
            optimizer.zero_grad(set_to_none=True)


def _sum(learner: Learner, batch: RolloutBatch, config: Config) -> torch.Tensor:
    if learner.name != "actor":
        return learner.module(*inputs(batch)).sum()
    charged = config.algorithm.entropy_coeff > 0
    logprobs, entropy = learner.module(*inputs(batch), config.rollout.temperature, True, charged)
    return logprobs.sum() + entropy.sum() if charged else logprobs.sum()
