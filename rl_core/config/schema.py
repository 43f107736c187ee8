"""`Config`: all sections, and the rules that span several of them."""

import math
from typing import Any, Literal

from pydantic import model_validator

from rl_core.config.algorithm import AlgorithmConfig
from rl_core.config.base import Runtime, Section
from rl_core.config.data import DataConfig, ReasoningGymSource
from rl_core.config.evaluation import EvaluationConfig, RegistryConfig
from rl_core.config.fsdp import FsdpConfig
from rl_core.config.model import ModelConfig
from rl_core.config.reward import ReasoningGymReward, RewardConfig, model_of
from rl_core.config.roles import ActorConfig, CriticConfig, MappingConfig, ReferenceConfig, RoleConfig
from rl_core.config.rollout import RolloutConfig
from rl_core.config.trainer import CheckpointConfig, LaunchConfig, TrainerConfig
from rl_core.errors import ConfigError

Role = Literal["actor", "critic", "ref", "reward"]
PROMPTS_PER_STEP = 64


class Config(Section):
    """One post-training: base model, prompts, reward, PPO, evaluation, registration."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    reward: RewardConfig = ReasoningGymReward(kind="reasoning_gym")
    registry: RegistryConfig = RegistryConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref_model: ReferenceConfig = ReferenceConfig()
    model_mapping: Runtime[MappingConfig] = MappingConfig()
    launch: LaunchConfig = LaunchConfig()
    fsdp: FsdpConfig = FsdpConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _reward_fits(self) -> "Config":
        if isinstance(self.reward, ReasoningGymReward) and not isinstance(self.data.source, ReasoningGymSource):
            raise ValueError("reward is missing: data.source is not reasoning_gym, so say what a response is worth")
        return self

    @model_validator(mode="after")
    def _attention_has_the_type(self) -> "Config":
        roles: tuple[Role, ...] = ("actor", "critic", "ref")
        exact = [role for role in roles if self.dtype_of(role) == "float32"]
        if self.model.attn_implementation == "flash_attention_2" and exact:
            raise ValueError(
                f"model.attn_implementation = flash_attention_2 computes in 16 bits only, but {' and '.join(exact)} would "
                "compute in float32 (torch_dtype); use sdpa, or bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _compared_responses(self) -> "Config":
        if self.algorithm.needs.group and self.rollout.n < 2:
            raise ValueError(
                f"algorithm.adv_estimator = {self.algorithm.adv_estimator} compares the responses to one prompt, and rollout.n = "
                f"{self.rollout.n}; set rollout.n to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _batches(self) -> "Config":
        trainer = self.trainer
        if trainer.gradient_accumulation_steps is not None and trainer.train_batch_size is not None:
            raise ValueError(
                "trainer.gradient_accumulation_steps and trainer.train_batch_size contradict each other: the one follows from "
                "the other and the number of ranks; leave one out"
            )
        if trainer.gradient_accumulation_steps is None:
            self._mini_batches_divide()
        return self

    def _mini_batches_divide(self) -> None:
        samples, mini = self.samples_per_step, self.mini_batch_size
        if samples % mini:
            nearest = sorted((d for d in range(1, samples + 1) if samples % d == 0), key=lambda d: abs(d - mini))[:2]
            raise ValueError(
                f"trainer.ppo_mini_batch_size = {mini} does not divide the {samples} responses of a step "
                f"(trainer.train_batch_size × rollout.n); use {' or '.join(map(str, sorted(nearest)))}"
            )

    def settled(self, ranks: int) -> "Config":
        """With `trainer.train_batch_size` worked out for so many ranks in all.

        Raises:
            ConfigError: the batch that follows is not whole prompts, or not whole mini-batches.
        """
        trainer = self.trainer
        if trainer.train_batch_size is not None:
            return self
        prompts = PROMPTS_PER_STEP
        if trainer.gradient_accumulation_steps is not None:
            actor = len(self.model_mapping.actor or range(ranks)) // self.fsdp_of("actor").ulysses_sequence_parallel_size
            samples = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * max(actor, 1)
            if samples % self.rollout.n:
                raise ConfigError(
                    f"trainer.gradient_accumulation_steps: {samples} responses a step (per_device_train_batch_size × "
                    f"gradient_accumulation_steps × {actor} ranks) are not a multiple of rollout.n = {self.rollout.n}."
                )
            prompts = samples // self.rollout.n
        settled = trainer.model_copy(update={"train_batch_size": prompts, "gradient_accumulation_steps": None})
        config = self.model_copy(update={"trainer": settled})
        try:
            config._mini_batches_divide()
        except ValueError as error:
            raise ConfigError(f"{error}.") from None
        return config

    @property
    def samples_per_step(self) -> int:
        """Responses of one step, over all ranks."""
        assert self.trainer.gradient_accumulation_steps is None, "settled() comes first"
        return (self.trainer.train_batch_size or PROMPTS_PER_STEP) * self.rollout.n

    @property
    def mini_batch_size(self) -> int:
        """Responses of one optimizer step, over all ranks."""
        return self.trainer.ppo_mini_batch_size or self.samples_per_step

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3", "abs"]:
        """The KL estimator in force."""
        return self.algorithm.kl_estimator or ("k3" if self.algorithm.kl_in == "loss" else "k1")

    @property
    def actor_starts_at(self) -> int:
        """The first step in which the actor is updated."""
        return self.algorithm.critic_warmup if self.algorithm.needs.critic else 0

    @property
    def eval_max_new_tokens(self) -> int:
        """Longest response during evaluation."""
        return self.evaluation.max_new_tokens or self.rollout.max_new_tokens

    def roles(self) -> list[Role]:
        """The roles that a run has."""
        roles: list[Role] = ["actor", "critic"] if self.algorithm.needs.critic else ["actor"]
        if self.algorithm.kl_in != "none":
            roles.append("ref")
        if model_of(self.reward) is not None:
            roles.append("reward")
        return roles

    def role(self, role: Role) -> RoleConfig:
        """The section of a role."""
        sections: dict[str, RoleConfig] = {"actor": self.actor, "critic": self.critic, "ref": self.ref_model}
        judge = model_of(self.reward)
        if judge is not None:
            sections["reward"] = judge
        return sections[role]

    def fsdp_of(self, role: Role) -> FsdpConfig:
        """`fsdp` with what the role sets differently. The layer classes in `fsdp` are the base model's: a reward model has its
        own."""
        shared = self.fsdp
        if role == "reward":
            own = shared.wrap_policy.model_copy(update={"transformer_layer_cls_to_wrap": None})
            shared = shared.model_copy(update={"wrap_policy": own})
        return self.role(role).fsdp.over(shared)

    def dtype_of(self, role: Role) -> str:
        """The type in which a role computes, as far as the device has it."""
        own = self.fsdp_of(role).mixed_precision.param_dtype or self.role(role).torch_dtype
        if role == "ref" and self.ref_model.disable_half_cast:
            return own or "float32"
        return own or self.model.torch_dtype

    def training_identity(self) -> dict[str, Any]:
        """The part of a settled configuration that decides what each step of the training does (model, data and reward count by
        their content, beside this)."""
        parts = ("model", "rollout", "algorithm", "trainer", "reward")
        roles: tuple[Role, ...] = ("actor", "critic", "ref")
        identity = {name: getattr(self, name).identity() for name in parts}
        for role in (role for role in roles if role in self.roles()):
            identity[role] = self.role(role).identity() | {"fsdp": self.fsdp_of(role).identity()}
            if identity[role].get("lr_scheduler_type", "constant") != "constant":
                identity["length"] = [self.trainer.max_steps, self.trainer.num_train_epochs]
        if model_of(self.reward) is not None:
            identity["reward"]["fsdp"] = self.fsdp_of("reward").identity()
        return identity

    def total_steps(self, train_prompts: int) -> int:
        """PPO steps of the whole run on a training split of `train_prompts` prompts."""
        if self.trainer.max_steps is not None:
            return self.trainer.max_steps
        return math.ceil(self.trainer.num_train_epochs * train_prompts * self.rollout.n / self.samples_per_step)
