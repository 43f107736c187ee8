"""The phases of a PPO step before the updates, each a function of its inputs; `rl_core.ppo` puts them in order.

All ranks hold the whole step. In each phase a rank computes its part, and the parts are shared with all: what a phase returns
is the same on every rank, whichever ranks hold the role that computed it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.batching import BatchPlan
from rl_core.data.prompts import Prompt
from rl_core.role import Role
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.engine import RolloutEngine
from rl_core.together import together


def generate(
    engine: RolloutEngine | None,
    role: Role,
    prompts: list[Prompt],
    *,
    n: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    step: int,
    stop_ids: set[int],
    batch_size: int,
    device: torch.device,
) -> RolloutBatch:
    """All responses of a step, `n` for each prompt, drawn by the ranks of `role` (the others have no engine). Collective.

    Response number i answers prompt i // n. Its random draws depend on (seed, step, i, position) only.

    Raises:
        NonFiniteError: a rank's logits are not finite (on all ranks).
    """
    rank, total = role.group.rank, len(prompts) * n
    mine = [number for number in range(total) if number // n % role.group.size == rank]  # a prompt's responses together

    def draw() -> RolloutBatch | None:
        if engine is None or not mine:
            return None
        batch = engine.generate(
            [prompts[number // n].input_ids for number in mine],
            mine,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            step=step,
            stop_ids=stop_ids,
            batch_size=batch_size,
        )
        return batch.to("cpu")

    parts: list[RolloutBatch | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, together(draw))
    whole = RolloutBatch.cat([part for part in parts if part is not None])
    return whole.select(whole.sample_index.argsort()).to(device)


def records(tokenizer: Any, prompts: list[Prompt], batch: RolloutBatch, scores: Tensor, n: int) -> list[dict[str, Any]]:
    """The responses of a batch whose first rows answer the first prompts, readable."""
    texts = tokenizer.batch_decode(batch.responses, skip_special_tokens=True)
    return [
        {
            "sample": row,
            "prompt": prompts[row // n].text,
            "response": text,
            "reward": reward,
            "ground_truth": prompts[row // n].ground_truth,
        }
        for row, (text, reward) in enumerate(zip(texts, scores.tolist(), strict=True))
    ]


@torch.no_grad()
def log_probabilities(role: Role, batch: RolloutBatch, plan: BatchPlan, temperature: float) -> Tensor:
    """[B, R] log-probability of each response token under a policy, 0 behind the end. Collective."""
    result = torch.zeros(len(batch), batch.width, device=batch.input_ids.device)
    if role.module is not None:
        with role.loaded():
            for rows in plan.portions(batch, role.group.data_parallel, role.group.part):
                part = portion(batch, rows)
                logprobs, _ = role.module(*inputs(part), temperature, entropy=False)
                result[rows, : part.width] = logprobs[: len(rows)]
    return role.share(result)


@torch.no_grad()
def state_values(role: Role, batch: RolloutBatch, plan: BatchPlan) -> Tensor:
    """[B, R] the critic's value before each response token, 0 behind the end. Collective."""
    result = torch.zeros(len(batch), batch.width, device=batch.input_ids.device)
    if role.module is not None:
        with role.loaded():
            for rows in plan.portions(batch, role.group.data_parallel, role.group.part):
                part = portion(batch, rows)
                result[rows, : part.width] = role.module(*inputs(part))[: len(rows)]
    return role.share(result)


def portion(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """The given rows; without rows one of no weight, since every rank must run the model."""
    return batch.select(rows) if len(rows) else batch.select(rows).pad_rows(1)


def inputs(batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor, int]:
    """What the models take of a batch."""
    return batch.input_ids, batch.prompt_length, batch.response_length, batch.width
