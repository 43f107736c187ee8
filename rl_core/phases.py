"""The phases of a PPO step, each a function of its inputs; `rl_core.ppo` puts them in order."""

import torch
from torch import Tensor, nn

from rl_core import algorithms
from rl_core.batching import BatchPlan, Experience, by_length
from rl_core.config import Config
from rl_core.data.prompts import Prompt
from rl_core.distributed import World
from rl_core.learner import Learner
from rl_core.metrics import StepStatistics
from rl_core.rewards import Reward
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.engine import RolloutEngine
from rl_core.together import together


def generate(
    engine: RolloutEngine, prompts: list[Prompt], plan: BatchPlan, config: Config, step: int, rank: int, stop_ids: set[int]
) -> RolloutBatch:
    """This rank's responses of a step: `plan.rows` rows for each mini-batch, one mini-batch after the other.

    Response number i of the step answers prompt i // rollout.n. Its random draws depend on (seed, step, i, position) only.

    Raises:
        NonFiniteError: a rank's logits are not finite (on all ranks).
    """
    parts = [list(plan.samples_of(rank, mini)) for mini in range(plan.mini_batches)]
    numbers = [number for part in parts for number in part]
    batch = together(
        lambda: engine.generate(
            [prompts[number // config.rollout.n].input_ids for number in numbers],
            numbers,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            seed=config.trainer.seed,
            step=step,
            stop_ids=stop_ids,
            batch_size=config.rollout.batch_size,
        )
    )
    starts = [sum(map(len, parts[:mini])) for mini in range(len(parts))]
    padded = [
        batch.select(range(start, start + len(part))).pad_rows(plan.rows) for start, part in zip(starts, parts, strict=True)
    ]
    return RolloutBatch.cat(padded)


def score(reward: Reward, tokenizer, prompts: list[Prompt], batch: RolloutBatch, n: int) -> tuple[Tensor, list[dict]]:
    """Rewards [B] of the responses (0 for dummy rows), and the responses as readable records. Empty responses count too.

    Raises:
        RewardError: a response cannot be judged (on all ranks).
    """
    real = [row for row, number in enumerate(batch.sample_index.tolist()) if number >= 0]
    numbers = batch.sample_index[real].tolist()
    asked = [prompts[number // n] for number in numbers]
    ids = batch.responses
    texts = tokenizer.batch_decode([ids[row] for row in real], skip_special_tokens=True)
    rewards = together(lambda: reward(asked, texts))
    scores = torch.zeros(len(batch), device=batch.input_ids.device)
    scores[real] = torch.tensor(rewards, dtype=torch.float32, device=scores.device)
    records = [
        {
            "sample": number,
            "prompt": prompt.text,
            "response": text,
            "reward": value,
            "ground_truth": prompt.ground_truth,
        }
        for number, prompt, text, value in zip(numbers, asked, texts, rewards, strict=True)
    ]
    return scores, records


@torch.no_grad()
def log_probabilities(policy: nn.Module, batch: RolloutBatch, micro_batch: int, temperature: float) -> Tensor:
    """[B, R] log-probability of each response token under a policy, 0 behind the end."""
    result = torch.zeros(len(batch), batch.width, device=batch.input_ids.device)
    for rows in by_length(batch, micro_batch):
        part = batch.select(rows)
        result[rows, : part.width], _ = policy(*inputs(part), temperature, entropy=False)
    return result


@torch.no_grad()
def state_values(critic: nn.Module, batch: RolloutBatch, micro_batch: int) -> Tensor:
    """[B, R] the critic's value before each response token, 0 behind the end."""
    result = torch.zeros(len(batch), batch.width, device=batch.input_ids.device)
    for rows in by_length(batch, micro_batch):
        part = batch.select(rows)
        result[rows, : part.width] = critic(*inputs(part))
    return result


def make_experience(
    batch: RolloutBatch,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    values: Tensor,
    config: Config,
    world: World,
    stats: StepStatistics,
) -> Experience:
    """Token rewards (the score at the end, the KL at each token), GAE, whitening over all ranks."""
    algorithm, mask, charged = config.algorithm, batch.mask, None
    if ref_logprobs is not None:
        divergence = algorithms.kl(logprobs, ref_logprobs, mask, config.kl_estimator)
        stats.token_mean("actor/reference_kl", divergence, mask)
        charged = divergence if algorithm.kl_in == "reward" else None
    rewards = algorithms.token_rewards(scores, charged, algorithm.kl_coef, mask)
    advantages, returns = algorithms.gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
    if algorithm.whiten_advantages:
        advantages = algorithms.whiten(advantages, mask, world.sum)
    stats.per_sample("critic/rewards", rewards.sum(dim=1)[batch.sample_index >= 0])
    for name, tensor in {"values": values, "advantages": advantages, "returns": returns}.items():
        stats.token_mean(f"critic/{name}/mean", tensor, mask)
    return Experience(
        batch=batch, logprobs=logprobs, ref_logprobs=ref_logprobs, values=values, advantages=advantages, returns=returns
    )


def update_actor(
    actor: Learner, mini: Experience, plan: BatchPlan, config: Config, world: World, stats: StepStatistics, optimizer_step: int
) -> None:
    """One optimizer step of the policy on this rank's part of a mini-batch."""
    algorithm = config.algorithm
    tokens = world.sum(mini.batch.mask.sum()).clamp(min=1)
    micro_batches = mini.micro_batches(plan.micro_batch)
    for micro in micro_batches:
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
        stats.means("actor", sums, mask.sum())
        actor.backward(loss.sum() / tokens, last=micro is micro_batches[-1])
    stats.optimizer_step("actor", actor.step(optimizer_step))


def update_critic(
    critic: Learner, mini: Experience, plan: BatchPlan, config: Config, world: World, stats: StepStatistics, optimizer_step: int
) -> None:
    """One optimizer step of the critic on this rank's part of a mini-batch."""
    tokens = world.sum(mini.batch.mask.sum()).clamp(min=1)
    micro_batches = mini.micro_batches(plan.micro_batch)
    for micro in micro_batches:
        mask = micro.batch.mask
        values = critic.module(*inputs(micro.batch))
        loss, sums = algorithms.value_loss(values, micro.values, micro.returns, mask, config.algorithm.cliprange_value)
        stats.means("critic", sums | {"vf_loss": loss.detach().sum()}, mask.sum())
        critic.backward(loss.sum() / tokens, last=micro is micro_batches[-1])
    stats.optimizer_step("critic", critic.step(optimizer_step))


def inputs(batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor, int]:
    """What the models take of a batch."""
    return batch.input_ids, batch.prompt_length, batch.response_length, batch.width
