"""The largest micro-batch that can come, tried before the first step, so that a lack of memory shows now and not hours in."""

import math

import torch

from rl_core import stall
from rl_core.batching import BatchPlan
from rl_core.learner import Learner
from rl_core.models.tensors import optimizer_tensors
from rl_core.optimizers import compress
from rl_core.phases import inputs
from rl_core.rollout.batch import PAD_ID, RolloutBatch


def try_largest_batch(
    actor: Learner, critic: Learner, plan: BatchPlan, prompt: int, response: int, temperature: float, device: torch.device
) -> None:
    """One forward and backward of actor and critic beside their optimizers' moments. Changes nothing. Collective over each role.

    Args:
        prompt, response: tokens of the longest that can come.
        device: on which the models compute.

    Raises:
        torch.OutOfMemoryError: it does not fit; `rl_core.entry` says what needs less.
    """
    for learner in (actor, critic):
        if learner.optimizer is None:
            continue
        rows = min(plan.micro_batch, math.ceil(plan.mini_batch / learner.group.data_parallel))
        if plan.micro_tokens is not None:
            rows = max(1, plan.micro_tokens // (prompt + response))
        batch = RolloutBatch.from_lists(
            [[PAD_ID] * prompt] * rows,
            [[PAD_ID] * response] * rows,
            [[0.0] * response] * rows,
            [True] * rows,
            list(range(rows)),
            device,
        )
        with stall.phase(f"trying the largest batch of the {learner.name}"), learner.loaded(optimizer=True):
            optimizer_tensors(learner.module, learner.optimizer)  # made where they are not there yet
            compress(learner.optimizer)
            more = (temperature, True) if learner is actor else ()
            result = learner.module(*inputs(batch), *more)
            total = result[0].sum() + result[1].sum() if learner is actor else result.sum()
            learner.backward(total * 0.0, last=True)
            learner.optimizer.zero_grad(set_to_none=True)
