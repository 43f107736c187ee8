"""`trainer`: batches, optimizers, length of the run; `launch`: how many processes."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rl_core.config.base import Runtime, Section


class TrainerConfig(Section):
    """The PPO loop: its batches, its optimizers and when it ends. Sizes are global unless `per_device` says otherwise."""

    seed: int = 0
    """Seed of prompt order, sampling and initialisation."""

    max_steps: Annotated[Runtime[int | None], Field(gt=0)] = None
    """PPO steps (rollout + update) in all. A finished run goes on when this is raised. null: `num_train_epochs` decides."""

    num_train_epochs: Annotated[Runtime[int], Field(gt=0)] = 1
    """Passes over the training prompts; has no effect with `max_steps`."""

    train_batch_size: PositiveInt = 64
    """Prompts per step; with `rollout.n` responses each."""

    ppo_mini_batch_size: PositiveInt | None = None
    """Responses per optimizer step; must divide `train_batch_size × rollout.n`. null: all of them in one."""

    per_device_train_batch_size: Annotated[Runtime[int], Field(gt=0)] = 8
    """Responses that one rank puts through the model at a time (micro-batch). Changes memory and speed, not the result."""

    learning_rate: NonNegativeFloat = 1e-6
    """Of the actor."""

    critic_learning_rate: NonNegativeFloat = 1e-5
    """Of the critic."""

    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which both learning rates rise linearly from 0."""

    weight_decay: NonNegativeFloat = 0.0
    """Of AdamW, both models."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""

    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's ε."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm, actor and critic apart."""


class LaunchConfig(Section):
    """The processes that train and evaluate."""

    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """`auto` takes the GPUs where there are any."""

    nproc_per_node: Annotated[Runtime[int | None], Field(gt=0)] = None
    """Ranks on this host. null: one per GPU, or one on a machine without."""

    threads_per_rank: Annotated[Runtime[int | None], Field(gt=0)] = None
    """CPU threads of a rank. null: the cores shared out evenly."""

    grace_seconds: Annotated[Runtime[float], Field(ge=0, le=25)] = 20.0
    """After Ctrl-C, SIGTERM or a cancel, time for the running step to end and be saved, before the ranks are killed.
    Prefect kills a cancelled flow after 30 s."""


class FsdpConfig(Section):
    """Sharding of parameters, gradients and optimizer states over the ranks (FSDP2 `fully_shard`)."""

    fsdp_transformer_layer_cls_to_wrap: Runtime[list[str] | None] = None
    """Classes of which each instance becomes a unit of its own. null: the model's own `_no_split_modules`."""

    reshard_after_forward: Runtime[bool] = True
    """Free a unit's gathered parameters after its forward and gather them again for the backward: less memory, more
    communication."""

    activation_checkpointing: Runtime[bool] = False
    """Recompute each unit's activations in the backward instead of keeping them."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks. bfloat16 loses small contributions."""


class CheckpointConfig(Section):
    """What of a running training is saved."""

    save_steps: Annotated[Runtime[int], Field(gt=0)] = 50
    """A checkpoint every so many steps, and one at the end."""

    keep: Annotated[Runtime[int], Field(ge=2)] = 2
    """Newest checkpoints kept. Never fewer than two: the newest could be damaged."""
