"""The updates of a PPO step: one optimizer step of the actor, or of the critic, on a mini-batch.

Only the ranks of the role take part, so that actor and critic on disjoint ranks are updated at the same time.
"""

import torch
from torch import Tensor

from rl_core import algorithms
from rl_core.batching import BatchPlan
from rl_core.config import Config
from rl_core.experience import Experience
from rl_core.learner import Learner
from rl_core.metrics import StepStatistics
from rl_core.phases import inputs, log_probabilities
from rl_core.rollout.sampling import uniform

CHOOSING = 0x63686F6F7365
"""Added to the seed for the draws by which clip_cov chooses tokens, so that they are not those of the rollout."""


def update_actor(
    actor: Learner, mini: Experience, plan: BatchPlan, config: Config, kl_coef: float, stats: StepStatistics, optimizer_step: int
) -> None:
    """One optimizer step of the policy on a mini-batch. Collective over the actor's ranks; does nothing on others.

    (Where the loss needs the whole mini-batch's log-probabilities beforehand, collective over all ranks.)
    """
    algorithm, temperature = config.algorithm, config.rollout.temperature
    chosen = _chosen(actor, mini, plan, config, optimizer_step) if algorithms.needs_whole_mini_batch(algorithm) else None
    if actor.module is None:
        return
    group, weights = actor.group, _weights(mini, config)
    portions = plan.portions(mini.batch, group.data_parallel, group.part)
    with actor.loaded(optimizer=True):
        for number, rows in enumerate(portions, start=1):
            micro, weight = mini.select(rows), _of(weights, rows)
            mask = micro.batch.mask
            logprobs, entropy = actor.module(
                *inputs(micro.batch), temperature, entropy=True, entropy_gradient=algorithm.entropy_coeff > 0
            )
            update = algorithms.Update(
                logprobs=logprobs,
                old_logprobs=micro.logprobs,
                advantages=micro.advantages,
                mask=mask,
                chosen=None if chosen is None or not len(rows) else chosen[rows, : micro.batch.width],
            )
            loss, sums = algorithms.policy_loss(update, algorithm)
            if micro.importance is not None:
                loss = loss * micro.importance
            parts = {"pg_loss": loss, "entropy": algorithms.masked(entropy, mask)}
            if algorithm.entropy_coeff:
                loss = loss + algorithm.entropy_coeff * algorithms.entropy_loss(entropy, mask)
            if algorithm.kl_in == "loss" and micro.ref_logprobs is not None:
                parts["kl_loss"] = algorithms.kl(logprobs, micro.ref_logprobs, mask, config.kl_estimator)
                loss = loss + kl_coef * parts["kl_loss"]
            total = (loss.sum(dim=1) * weight).sum()
            if group.reports:
                share = mask.sum() / mini.batch.mask.sum().clamp(min=1)
                stats.means("actor", sums, mask.sum())
                stats.means("actor", {"loss": total.detach()}, share)
                stats.means("actor", {name: (part.detach().sum(dim=1) * weight).sum() for name, part in parts.items()}, share)
            actor.backward(total, last=number == len(portions))
        _step(actor, optimizer_step, stats)


def update_critic(
    critic: Learner, mini: Experience, plan: BatchPlan, config: Config, stats: StepStatistics, optimizer_step: int
) -> None:
    """One optimizer step of the critic on a mini-batch. Collective over the critic's ranks; does nothing on others."""
    if critic.module is None:
        return
    group, weights = critic.group, _weights(mini, config)
    portions = plan.portions(mini.batch, group.data_parallel, group.part)
    with critic.loaded(optimizer=True):
        for number, rows in enumerate(portions, start=1):
            micro, weight = mini.select(rows), _of(weights, rows)
            mask = micro.batch.mask
            assert micro.values is not None, "where there is a critic, there are its values"
            values = critic.module(*inputs(micro.batch))
            loss, sums = algorithms.value_loss(values, micro.values, micro.returns, mask, config.algorithm.cliprange_value)
            total = (loss.sum(dim=1) * weight).sum()
            if group.reports:
                stats.means("critic", sums, mask.sum())
                stats.means("critic", {"vf_loss": total.detach()}, mask.sum() / mini.batch.mask.sum().clamp(min=1))
            critic.backward(total, last=number == len(portions))
        _step(critic, optimizer_step, stats)


def _weights(mini: Experience, config: Config) -> Tensor:
    """[B] weight of each response's summed losses, by which they become the loss of the mini-batch on all ranks."""
    algorithm = config.algorithm
    scale = algorithm.loss_scale_factor or float(config.rollout.max_new_tokens)
    return algorithms.row_weights(mini.batch.mask, algorithm.aggregation, scale)


def _of(weights: Tensor, rows: Tensor) -> Tensor:
    return weights[rows] if len(rows) else weights.new_zeros(1)


def _chosen(actor: Learner, mini: Experience, plan: BatchPlan, config: Config, optimizer_step: int) -> Tensor:
    """[B, R] the tokens of the mini-batch that the loss treats apart. Collective over all ranks; the same on all."""
    batch = mini.batch
    logprobs = log_probabilities(actor, batch, plan, config.rollout.temperature)
    draws = uniform(
        config.trainer.seed + CHOOSING, optimizer_step, batch.sample_index, torch.zeros_like(batch.sample_index), batch.width
    )
    return algorithms.chosen_tokens(logprobs, mini.logprobs, mini.advantages, batch.mask, draws, config.algorithm)


def _step(learner: Learner, optimizer_step: int, stats: StepStatistics) -> None:
    said = learner.step(optimizer_step)
    if learner.group.rank == 0:
        stats.optimizer_step(learner.name, said)
