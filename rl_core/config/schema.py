"""`Config`: all sections, and the rules that span several of them."""

import math
from typing import Any, Literal

from pydantic import model_validator

from rl_core.config.algorithm import AlgorithmConfig
from rl_core.config.base import Section
from rl_core.config.data import DataConfig
from rl_core.config.evaluation import EvaluationConfig, RegistryConfig
from rl_core.config.model import ModelConfig
from rl_core.config.reward import RewardConfig
from rl_core.config.rollout import RolloutConfig
from rl_core.config.trainer import CheckpointConfig, FsdpConfig, LaunchConfig, TrainerConfig


class Config(Section):
    """One post-training: base model, prompts, reward, PPO, evaluation, registration."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    registry: RegistryConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    launch: LaunchConfig = LaunchConfig()
    fsdp: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _mini_batches_divide(self) -> "Config":
        samples, mini = self.samples_per_step, self.mini_batch_size
        if samples % mini:
            nearest = sorted((d for d in range(1, samples + 1) if samples % d == 0), key=lambda d: abs(d - mini))[:2]
            raise ValueError(
                f"trainer.ppo_mini_batch_size = {mini} does not divide the {samples} responses of a step "
                f"(trainer.train_batch_size × rollout.n); use {' or '.join(map(str, sorted(nearest)))}"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Responses of one step, over all ranks."""
        return self.trainer.train_batch_size * self.rollout.n

    @property
    def mini_batch_size(self) -> int:
        """Responses of one optimizer step, over all ranks."""
        return self.trainer.ppo_mini_batch_size or self.samples_per_step

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The KL estimator in force."""
        return self.algorithm.kl_estimator or ("k3" if self.algorithm.kl_in == "loss" else "k1")

    @property
    def eval_max_new_tokens(self) -> int:
        """Longest response during evaluation."""
        return self.evaluation.max_new_tokens or self.rollout.max_new_tokens

    def training_identity(self) -> dict[str, Any]:
        """The part of the configuration that decides what each step of the training does (model, data and reward count by
        their content, beside this)."""
        parts = ("model", "rollout", "algorithm", "trainer", "fsdp", "reward")
        return {name: getattr(self, name).identity() for name in parts}

    def total_steps(self, train_prompts: int) -> int:
        """PPO steps of the whole run on a training split of `train_prompts` prompts."""
        if self.trainer.max_steps is not None:
            return self.trainer.max_steps
        return math.ceil(self.trainer.num_train_epochs * train_prompts / self.trainer.train_batch_size)
