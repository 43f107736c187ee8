"""`actor`, `critic`, `ref_model`: what a role has apart from the others."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rl_core.config.base import Section
from rl_core.config.dtypes import Dtype
from rl_core.config.fsdp import FsdpOverrides


class RoleConfig(Section):
    """A model in a run."""

    torch_dtype: Dtype | None = None
    """Type in which this role computes. null: `model.torch_dtype`."""

    fsdp: FsdpOverrides = FsdpOverrides()
    """Keys of `fsdp` that are different for this role; the others are as in `fsdp`."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft: only they are trained and saved."""

    rank: PositiveInt = 16
    """Rank of the update."""

    alpha: PositiveFloat = 32.0
    """The update counts alpha / rank times."""

    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter, or all of them but the head."""


class TrainedRoleConfig(RoleConfig):
    """A model that is trained: its AdamW and its learning rate."""

    learning_rate: NonNegativeFloat = 1e-6
    """The highest learning rate."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to `min_lr_ratio` × `learning_rate` at the last optimizer step, along a line or a
    half cosine. The falling ones make the length of the run part of its identity."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where a falling learning rate ends, as a share of `learning_rate`."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps the moments in 8 bits (Dettmers et al. 2022, arXiv:2110.02861): a quarter of their memory."""

    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""

    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's ε."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""

    lora: LoraConfig | None = None
    """Train adapters instead of the weights. null: train all weights."""


class ActorConfig(TrainedRoleConfig):
    """The policy that is trained."""


class CriticConfig(TrainedRoleConfig):
    """The value model: the base model's backbone with a linear head."""

    learning_rate: NonNegativeFloat = 1e-5
    """The highest learning rate."""


class ReferenceConfig(RoleConfig):
    """The frozen base model to which the KL is measured."""

    disable_half_cast: bool = False
    """The reference computes in float32, or in `ref_model.torch_dtype` where that is given, and never in another half type
    because the device lacks that one."""


class MappingConfig(Section):
    """Which ranks hold which role; null: all. Actor and critic on disjoint ranks are updated at the same time."""

    actor: list[NonNegativeInt] | None = None
    """Ranks that generate and train the policy."""

    critic: list[NonNegativeInt] | None = None
    """Ranks of the critic."""

    ref: list[NonNegativeInt] | None = None
    """Ranks of the reference model. null: as `actor`."""

    reward: list[NonNegativeInt] | None = None
    """Ranks of a reward model."""
