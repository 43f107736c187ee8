"""The phases of a PPO step before the updates, each a function of its inputs; `rl_core.ppo` puts them in order.

All ranks hold the whole step. In each phase a rank computes its part, and the parts are shared with all: what a phase returns
is the same on every rank, whichever ranks hold the role that computed it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core import algorithms
from rl_core.batching import BatchPlan, Experience
from rl_core.config import Config
from rl_core.data.prompts import Prompt
from rl_core.distributed import World
from rl_core.metrics import StepStatistics
from rl_core.rewards import Reward
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


def score(reward: Reward, tokenizer: Any, prompts: list[Prompt], batch: RolloutBatch, n: int, world: World) -> Tensor:
    """Rewards [B] of all responses by a function, empty ones included. The ranks share the work. Collective.

    Raises:
        RewardError: a response cannot be judged (on all ranks).
    """
    mine = list(range(world.rank, len(batch), world.size))
    responses = batch.responses
    texts = tokenizer.batch_decode([responses[row] for row in mine], skip_special_tokens=True)
    rewards = together(lambda: reward([prompts[row // n] for row in mine], texts))
    scores = torch.zeros(len(batch), device=batch.input_ids.device)
    scores[mine] = torch.tensor(rewards, dtype=torch.float32, device=scores.device)
    dist.all_reduce(scores)
    return scores


@torch.no_grad()
def score_by_model(role: Role, batch: RolloutBatch, plan: BatchPlan) -> Tensor:
    """Rewards [B] of all responses by a reward model. Collective."""
    scores = torch.zeros(len(batch), device=batch.input_ids.device)
    if role.module is not None:
        portions = plan.portions(batch, role.group.data_parallel, role.group.part)
        parts = [portion(batch, rows) for rows in portions]
        model = role.module
        encoded = together(lambda: [model.encode(part.prompts, part.responses) for part in parts], role.group.process_group)
        with role.loaded():
            for rows, inputs_ in zip(portions, encoded, strict=True):
                scores[rows] = model(*inputs_)[: len(rows)]
    return role.share(scores)


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


def make_experience(
    batch: RolloutBatch,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    values: Tensor,
    config: Config,
    stats: StepStatistics,
) -> Experience:
    """Token rewards (the score at the end, the KL at each token), GAE, whitening over all responses of the step."""
    algorithm, mask, charged = config.algorithm, batch.mask, None
    if ref_logprobs is not None:
        divergence = algorithms.kl(logprobs, ref_logprobs, mask, config.kl_estimator)
        stats.token_mean("actor/reference_kl", divergence, mask)
        charged = divergence if algorithm.kl_in == "reward" else None
    rewards = algorithms.token_rewards(scores, charged, algorithm.kl_coef, mask)
    advantages, returns = algorithms.gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
    if algorithm.whitens:
        advantages = algorithms.whiten(advantages, mask)
    stats.per_sample("critic/rewards", rewards.sum(dim=1))
    for name, tensor in {"values": values, "advantages": advantages, "returns": returns}.items():
        stats.token_mean(f"critic/{name}/mean", tensor, mask)
    return Experience(
        batch=batch, logprobs=logprobs, ref_logprobs=ref_logprobs, values=values, advantages=advantages, returns=returns
    )


def portion(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """The given rows; without rows one of no weight, since every rank must run the model."""
    return batch.select(rows) if len(rows) else batch.select(rows).pad_rows(1)


def inputs(batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor, int]:
    """What the models take of a batch."""
    return batch.input_ids, batch.prompt_length, batch.response_length, batch.width
