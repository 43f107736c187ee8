"""The PPO loop. Each line of `train` is a phase; what a phase does is in `rl_core.phases` and `rl_core.updates`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rl_core import algorithms, phases, stall
from rl_core.batching import BatchPlan
from rl_core.checkpoint.deadline import Deadline
from rl_core.checkpoint.saver import Saver
from rl_core.checkpoint.steps import Checkpoints
from rl_core.config import Config
from rl_core.data.prompts import Prompt, Prompts
from rl_core.distributed import World, seed_global_generators
from rl_core.errors import Interrupted
from rl_core.experience import make_experience, reference_kl
from rl_core.learner import Learner
from rl_core.metrics import RunLog, StepStatistics, Timer, mean_and_deviation
from rl_core.models.tensors import optimizer_tensors, trained_tensors
from rl_core.optimizers import AdamW8bit
from rl_core.role import Role
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights
from rl_core.scoring import Scorer
from rl_core.updates import update_actor, update_critic
from rl_core.validation import validate

SAMPLES_LOGGED = 4
"""Responses of a step that are kept in `samples.jsonl`."""


@dataclass
class Run:
    """All that the loop works with."""

    config: Config
    world: World
    plan: BatchPlan
    prompts: Prompts
    eval_prompts: Prompts
    tokenizer: Any
    stop_ids: set[int]
    score: Scorer
    actor: Learner
    critic: Learner | None
    """None where the estimator needs no values."""
    reference: Role | None
    engine: RolloutEngine | None
    """On the actor's ranks."""
    checkpoints: Checkpoints
    saver: Saver
    deadline: Deadline
    stopping: Callable[[], bool]
    """Whether this rank was asked to stop."""
    total_steps: int
    key: str
    """Of the run, kept in its checkpoints."""
    identity: dict[str, Any]
    """What the key is the digest of."""
    log: RunLog
    kl_coef: float
    """Weight of the KL to the reference in the next step."""
    first_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step, on rank 0."""

    @property
    def learners(self) -> list[Learner]:
        """What is trained."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def generate(self, prompts: list[Prompt], step: int, greedy: bool = False) -> RolloutBatch:
        """The step's responses by the policy as it is now, or to each prompt that of the likeliest tokens. Collective."""
        rollout = self.config.rollout
        return phases.generate(
            self.engine,
            self.actor,
            prompts,
            n=1 if greedy else rollout.n,
            max_new_tokens=rollout.max_new_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            seed=self.config.trainer.seed,
            step=step,
            stop_ids=self.stop_ids,
            batch_size=rollout.batch_size,
            device=self.world.device,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint that this rank has a part of: what is trained and its optimizer moments, sharded, under
        dotted names."""
        return {
            f"{learner.name}{kind}.{name}": tensor
            for learner in self.learners
            if learner.optimizer is not None
            for kind, tensors in (
                ("", trained_tensors(learner.module)),
                ("_optimizer", optimizer_tensors(learner.module, learner.optimizer)),
            )
            for name, tensor in tensors.items()
        }

    def save(self, steps_done: int) -> None:
        """Begin to save a checkpoint after so many steps (a collective); `saver` says when it is committed."""
        learners = [learner for learner in self.learners if learner.group.rank == 0]
        parts = self.world.gather({learner.name: learner.state for learner in learners})
        state = {
            "step": steps_done,
            "learners": {name: state for part in parts for name, state in part.items()},
            "kl_coef": self.kl_coef,
            "ranks": self.world.size,
            "identity": self.identity,
        }
        self.saver.begin(steps_done, self.tensors(), state, self.key, self.metrics)
        self._compress()

    def saved(self) -> None:
        """Raise what a save has raised on any rank since it was begun (a collective)."""
        if self.world.any(self.saver.failed):
            self.saver.wait()

    def must_stop(self, step_seconds: float) -> bool:
        """Whether this is to be the last step for now, since a signal or the wall-clock limit says so (a collective)."""
        return self.world.any(self.stopping() or self.deadline.too_near(step_seconds, self.saver.longest))

    def restore(self, artifact: Any) -> None:
        """Go on from a committed checkpoint (a collective)."""
        with self._loaded():
            state = self.checkpoints.load(artifact, self.tensors())
            self._compress()
        self.first_step, self.kl_coef = state["step"], state["kl_coef"]
        for learner in self.learners:
            learner.restore(state["learners"][learner.name])

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        with ExitStack() as stack:
            for learner in self.learners:
                stack.enter_context(learner.loaded(optimizer=True))
            yield

    def _compress(self) -> None:
        for learner in self.learners:
            if isinstance(learner.optimizer, AdamW8bit):
                self.saver.wait_for_copy()  # else its moments would be in memory as floats during the rollout
                learner.optimizer.compress()


def train(run: Run) -> None:
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) of a language model, from `run.first_step` on.

    Raises:
        Interrupted: it was asked to stop; a checkpoint of the last whole step is committed.
    """
    config, world, plan, log = run.config, run.world, run.plan, run.log
    seed, temperature, n = config.trainer.seed, config.rollout.temperature, config.rollout.n
    first_update = config.actor_starts_at
    for step in range(run.first_step, run.total_steps):
        timer, stats = Timer(step), StepStatistics(world.is_main)
        seed_global_generators(seed, step, world.rank)
        cursor = step * plan.prompts
        where = f"[Rank 0] PPO epoch {cursor // len(run.prompts)} | Step {step} |"

        prompts = run.prompts.take(seed, cursor, plan.prompts, config.trainer.shuffle)
        with timer("sync_weights"), run.actor.loaded():
            if run.engine is not None:
                sync_weights(run.actor.module, run.engine)
        with timer("gen"):
            batch = run.generate(prompts, step)
        log.line(f"{where} Rollout completed, generated {plan.responses} sequences")
        with timer("reward"):
            scores = run.score(prompts, batch, n)
        mean, deviation = mean_and_deviation(scores.total)
        log.line(f"{where} Reward computed, mean: {mean:.3f}, std: {deviation:.3f}")
        baseline = None
        if config.algorithm.needs.greedy:
            with timer("greedy"):
                baseline = run.score(prompts, run.generate(prompts, step, greedy=True), n=1).total
        with timer("old_log_prob"):
            logprobs = phases.log_probabilities(run.actor, batch, plan, temperature)
        with timer("ref"):
            reference = run.reference
            ref_logprobs = None if reference is None else phases.log_probabilities(reference, batch, plan, temperature)
        with timer("values"):
            values = None if run.critic is None else phases.state_values(run.critic, batch, plan)
        with timer("adv"):
            experience = make_experience(
                batch, scores, baseline, logprobs, ref_logprobs, values, run.kl_coef, config, stats
            )  # fmt: skip

        run.saver.wait_for_copy()
        for number, mini in enumerate(experience.mini_batches(plan), start=step * plan.optimizer_steps):
            if run.critic is not None:
                with timer("update_critic"):
                    update_critic(run.critic, mini, plan, config, stats, number)
            if step >= first_update:
                with timer("update_actor"):
                    update_actor(run.actor, mini, plan, config, run.kl_coef, stats, number - first_update * plan.optimizer_steps)
        run.kl_coef = algorithms.next_kl_coef(run.kl_coef, reference_kl(experience, config), plan.responses, config.algorithm)

        stats.rollout(batch, scores, logprobs)
        timer.seconds["save"] = run.saver.lost_seconds()
        metrics = run.metrics = stats.merge(world, timer)
        log.line(f"{where} Training step done, loss: {metrics.get('actor/loss', 0.0):.3g}")
        stop, last = world.any(run.stopping()), step + 1 == run.total_steps
        if config.evaluation.every_steps and (step + 1) % config.evaluation.every_steps == 0 and not stop:
            with stall.phase("validation", step):
                metrics |= validate(run)
        first = range(min(SAMPLES_LOGGED, len(batch)))
        log.step(step, metrics, phases.records(run.tokenizer, prompts, batch.select(first), scores.total[list(first)], n))
        stop = stop or run.must_stop(timer.total())
        run.saved()
        if stop or last or (step + 1) % config.checkpoint.save_steps == 0:
            with stall.phase("saving", step):
                run.save(step + 1)
                if stop or last:
                    run.saver.wait()
        if stop and not last:
            raise Interrupted(
                f"Stopped by a signal or the wall-clock limit after step {step + 1} of {run.total_steps}, which is saved."
            )
