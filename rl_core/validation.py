"""Validation: the policy in training answers held-out prompts."""

from typing import TYPE_CHECKING

import torch

from rl_core import phases
from rl_core.config import Config
from rl_core.data.prompts import Prompt, Prompts
from rl_core.role import Role
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights

if TYPE_CHECKING:
    from rl_core.ppo import Run


def held_out(prompts: Prompts, most: int) -> list[Prompt]:
    """The held-out prompts that are asked: each once, the first by their content hashes, whatever order the files have."""
    distinct = {prompt.prompt_id: prompt for prompt in (prompts[i] for i in range(len(prompts)))}
    return [distinct[prompt_id] for prompt_id in sorted(distinct)][:most]


def answers(
    engine: RolloutEngine | None, role: Role, prompts: list[Prompt], config: Config, stop_ids: set[int], device: torch.device
) -> RolloutBatch:
    """One answer to each prompt, with the draws of an evaluation. Collective."""
    settings = config.evaluation
    return phases.generate(
        engine,
        role,
        prompts,
        n=1,
        max_new_tokens=config.eval_max_new_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        step=0,
        stop_ids=stop_ids,
        batch_size=config.rollout.batch_size,
        device=device,
    )


def validate(run: "Run") -> dict[str, float]:
    """Mean reward and share of right answers (`evaluation.success_reward`) of the policy as it is now, with the draws of an
    evaluation. Collective."""
    config, settings = run.config, run.config.evaluation
    chosen = held_out(run.eval_prompts, settings.prompts)
    if run.engine is not None:
        with run.actor.loaded():
            sync_weights(run.actor.module, run.engine)
    batch = answers(run.engine, run.actor, chosen, config, run.stop_ids, run.world.device)
    scores = run.score(chosen, batch, n=1).total
    return {
        "val/reward/mean": float(scores.double().mean()),
        "val/accuracy": float((scores >= settings.success_reward).double().mean()),
        "val/response_length/mean": float(batch.response_length.double().mean()),
    }
