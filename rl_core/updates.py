"""The updates of a PPO step: one optimizer step of the actor, or of the critic, on a mini-batch.

Only the ranks of the role take part, so that actor and critic on disjoint ranks are updated at the same time.
"""

import torch

from rl_core import algorithms
from rl_core.batching import BatchPlan, Experience
from rl_core.config import Config
from rl_core.learner import Learner
from rl_core.metrics import StepStatistics
from rl_core.phases import inputs


def update_actor(
    actor: Learner, mini: Experience, plan: BatchPlan, config: Config, stats: StepStatistics, optimizer_step: int
) -> None:
    """One optimizer step of the policy on a mini-batch. Collective over the actor's ranks; does nothing on others."""
    if actor.module is None:
        return
    algorithm, group, tokens = config.algorithm, actor.group, _tokens(mini)
    portions = plan.portions(mini.batch, group.data_parallel, group.part)
    with actor.loaded(optimizer=True):
        for number, rows in enumerate(portions, start=1):
            micro = mini.select(rows)
            mask = micro.batch.mask
            logprobs, entropy = actor.module(*inputs(micro.batch), config.rollout.temperature, entropy=True)
            loss, sums = algorithms.policy_loss(
                logprobs,
                micro.logprobs,
                micro.advantages,
                mask,
                algorithm.clip_ratio_low,
                algorithm.clip_ratio_high,
                algorithm.clip_ratio_c,
            )
            sums |= {"pg_loss": loss.detach().sum(), "entropy": algorithms.masked_sum(entropy.detach(), mask)}
            if algorithm.entropy_coeff:
                loss = loss + algorithm.entropy_coeff * algorithms.entropy_loss(entropy, mask)
            if algorithm.kl_in == "loss" and micro.ref_logprobs is not None:
                divergence = algorithms.kl(logprobs, micro.ref_logprobs, mask, config.kl_estimator)
                sums["kl_loss"] = divergence.detach().sum()
                loss = loss + algorithm.kl_coef * divergence
            sums["loss"] = loss.detach().sum()
            if group.reports:
                stats.means("actor", sums, mask.sum())
            actor.backward(loss.sum() / tokens, last=number == len(portions))
        _step(actor, optimizer_step, stats)


def update_critic(
    critic: Learner, mini: Experience, plan: BatchPlan, config: Config, stats: StepStatistics, optimizer_step: int
) -> None:
    """One optimizer step of the critic on a mini-batch. Collective over the critic's ranks; does nothing on others."""
    if critic.module is None:
        return
    group, tokens = critic.group, _tokens(mini)
    portions = plan.portions(mini.batch, group.data_parallel, group.part)
    with critic.loaded(optimizer=True):
        for number, rows in enumerate(portions, start=1):
            micro = mini.select(rows)
            mask = micro.batch.mask
            values = critic.module(*inputs(micro.batch))
            loss, sums = algorithms.value_loss(values, micro.values, micro.returns, mask, config.algorithm.cliprange_value)
            if group.reports:
                stats.means("critic", sums | {"vf_loss": loss.detach().sum()}, mask.sum())
            critic.backward(loss.sum() / tokens, last=number == len(portions))
        _step(critic, optimizer_step, stats)


def _tokens(mini: Experience) -> torch.Tensor:
    """Response tokens of the mini-batch on all ranks, by which losses are divided."""
    return mini.batch.mask.sum().clamp(min=1)


def _step(learner: Learner, optimizer_step: int, stats: StepStatistics) -> None:
    said = learner.step(optimizer_step)
    if learner.group.rank == 0:
        stats.optimizer_step(learner.name, said)
