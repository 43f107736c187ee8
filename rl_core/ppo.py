"""The PPO loop. Each line of `train` is a phase; what a phase does is in `rl_core.phases`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rl_core import phases
from rl_core.batching import BatchPlan
from rl_core.checkpoint.steps import Checkpoints
from rl_core.config import Config
from rl_core.data.prompts import Prompts
from rl_core.distributed import World, seed_global_generators
from rl_core.errors import Interrupted
from rl_core.learner import Learner
from rl_core.metrics import RunLog, StepStatistics, Timer, mean_and_deviation
from rl_core.models.policy import PolicyModel
from rl_core.models.tensors import model_tensors, optimizer_tensors
from rl_core.rewards import Reward
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights

SAMPLES_LOGGED = 4
"""Responses of a step that are kept in `samples.jsonl`."""


@dataclass
class Run:
    """All that the loop works with."""

    config: Config
    world: World
    plan: BatchPlan
    prompts: Prompts
    tokenizer: object
    stop_ids: set[int]
    reward: Reward
    actor: Learner
    critic: Learner
    reference: PolicyModel | None
    engine: RolloutEngine
    checkpoints: Checkpoints
    stopping: Callable[[], bool]
    """Whether this rank was asked to stop."""
    total_steps: int
    key: str
    """Identity of the run, kept in its checkpoints."""
    log: RunLog = field(init=False)
    first_step: int = 0

    def tensors(self) -> dict:
        """Every tensor of a checkpoint: models and optimizer moments, sharded, under dotted names."""
        return {
            f"{role}{kind}.{name}": tensor
            for role, learner in (("actor", self.actor), ("critic", self.critic))
            for kind, tensors in (
                ("", model_tensors(learner.module)),
                ("_optimizer", optimizer_tensors(learner.module, learner.optimizer)),
            )
            for name, tensor in tensors.items()
        }

    def save(self, steps_done: int) -> None:
        """Commit a checkpoint after so many steps (a collective)."""
        state = {
            "step": steps_done,
            "skipped": {learner.name: learner.skipped for learner in (self.actor, self.critic)},
            "ranks": self.world.size,
        }
        self.checkpoints.save(steps_done, self.tensors(), state, self.key)

    def restore(self, artifact) -> None:
        """Go on from a committed checkpoint (a collective)."""
        state = self.checkpoints.load(artifact, self.tensors())
        self.first_step = state["step"]
        for learner in (self.actor, self.critic):
            learner.skipped = state["skipped"][learner.name]


def train(run: Run) -> None:
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) of a language model, from `run.first_step` on.

    Raises:
        Interrupted: it was asked to stop; a checkpoint of the last whole step is committed.
    """
    config, world, plan, log = run.config, run.world, run.plan, run.log
    seed, micro, temperature = config.trainer.seed, plan.micro_batch, config.rollout.temperature
    for step in range(run.first_step, run.total_steps):
        timer, stats = Timer(), StepStatistics()
        seed_global_generators(seed, step, world.rank)
        cursor = step * plan.prompts
        where = f"[Rank 0] PPO epoch {cursor // len(run.prompts)} | Step {step} |"

        prompts = run.prompts.take(seed, cursor, plan.prompts)
        with timer("sync_weights"):
            sync_weights(run.actor.module, run.engine)
        with timer("gen"):
            batch = phases.generate(run.engine, prompts, plan, config, step, world.rank, run.stop_ids)
        log.line(f"{where} Rollout completed, generated {plan.responses} sequences")
        with timer("reward"):
            scores, records = phases.score(run.reward, run.tokenizer, prompts, batch, config.rollout.n)
        mean, deviation = mean_and_deviation(scores[batch.sample_index >= 0], world)
        log.line(f"{where} Reward computed, mean: {mean:.3f}, std: {deviation:.3f}")
        with timer("old_log_prob"):
            logprobs = phases.log_probabilities(run.actor.module, batch, micro, temperature)
        with timer("ref"):
            reference = run.reference
            ref_logprobs = None if reference is None else phases.log_probabilities(reference, batch, micro, temperature)
        with timer("values"):
            values = phases.state_values(run.critic.module, batch, micro)
        with timer("adv"):
            experience = phases.make_experience(batch, scores, logprobs, ref_logprobs, values, config, world, stats)

        for number, mini in enumerate(experience.mini_batches(plan), start=step * plan.optimizer_steps):
            with timer("update_critic"):
                phases.update_critic(run.critic, mini, plan, config, world, stats, number)
            with timer("update_actor"):
                phases.update_actor(run.actor, mini, plan, config, world, stats, number)

        stats.rollout(batch, scores, logprobs)
        metrics = stats.merge(world, timer)
        log.line(f"{where} Training step done, loss: {metrics.get('actor/loss', 0.0):.3f}")
        log.step(step, metrics, records[:SAMPLES_LOGGED])
        stop, last = world.any(run.stopping()), step + 1 == run.total_steps
        if stop or last or (step + 1) % config.checkpoint.save_steps == 0:
            run.save(step + 1)
        if stop and not last:
            raise Interrupted(f"Stopped by a signal after step {step + 1} of {run.total_steps}, which is saved.")
