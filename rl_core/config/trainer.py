"""`trainer`: batches and length of the run; `launch`: the processes; `checkpoint`: what is saved."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from rl_core.config.base import Runtime, Section

Logger = Literal["console", "mlflow"]
LONGEST_S = 10_000_000


class TrainerConfig(Section):
    """The PPO loop: its batches and when it ends. Sizes are global unless `per_device` says otherwise."""

    type: Literal["ppo"] = "ppo"
    """The algorithm's family."""

    seed: int = 0
    """Seed of prompt order, sampling and initialisation."""

    shuffle: bool = True
    """Take the prompts in another order in each epoch, by `seed`; false: in the order of the source."""

    max_steps: Annotated[Runtime[int | None], Field(gt=0)] = None
    """PPO steps (rollout + update) in all. A finished run goes on when this is raised. null: `num_train_epochs` decides."""

    num_train_epochs: Annotated[Runtime[int], Field(gt=0)] = 1
    """Passes over the training prompts; has no effect with `max_steps`."""

    train_batch_size: PositiveInt | None = None
    """Prompts per step; with `rollout.n` responses each. null: `per_device_train_batch_size` × `gradient_accumulation_steps` ×
    ranks of the actor (responses) where `gradient_accumulation_steps` is given, else 64."""

    gradient_accumulation_steps: Annotated[Runtime[int | None], Field(gt=0)] = None
    """Micro-batches per step on each rank, from which `train_batch_size` follows; not beside it."""

    ppo_mini_batch_size: PositiveInt | None = None
    """Responses per optimizer step; must divide `train_batch_size × rollout.n`. null: all of them in one."""

    per_device_train_batch_size: Annotated[Runtime[int], Field(gt=0)] = 8
    """Responses that one rank puts through the model at a time (micro-batch). Changes memory and speed, not the result."""

    max_tokens_per_micro_batch: Annotated[Runtime[int | None], Field(gt=0)] = None
    """A token budget instead: a micro-batch takes as many responses as fit with their prompts, padding included, at least one.
    Then `per_device_train_batch_size` has no effect but on `gradient_accumulation_steps`."""

    deterministic: Runtime[bool] = False
    """The same number of ranks gives the same bits, on GPUs too: torch's deterministic algorithms, at some cost of speed, and an
    error where an operation has none. On a CPU that is so in any case."""

    logger: Runtime[tuple[Logger, ...]] = ("console", "mlflow")
    """Where the progress of a step is shown: a line of the log, the MLflow run. `metrics.jsonl` is written in any case."""


class LaunchConfig(Section):
    """The processes that train and evaluate."""

    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """`auto` takes the GPUs where there are any."""

    nproc_per_node: Annotated[Runtime[int | None], Field(gt=0)] = None
    """Ranks on this host. null: one per GPU, or one on a machine without."""

    threads_per_rank: Annotated[Runtime[int | None], Field(gt=0)] = None
    """CPU threads of a rank. null: the cores shared out evenly."""

    max_restarts: Annotated[Runtime[int], Field(ge=0)] = 3
    """How often a training whose ranks died (a crash, a killed rank, a fault of the machine) is started again by itself, from its
    last checkpoint. The same error twice in a row ends it earlier. For trainings that `ppoflow run` starts; torchrun has
    `--max-restarts`."""

    grace_seconds: Annotated[Runtime[float], Field(ge=0, le=25)] = 20.0
    """After Ctrl-C, SIGTERM or a cancel, time for the running step to end and be saved, before the ranks are killed.
    Prefect kills a cancelled flow after 30 s."""

    dist_backend: Runtime[Literal["nccl", "gloo"] | None] = None
    """Communication between ranks. null: the environment's `TORCH_DISTRIBUTED_BACKEND`, else NCCL on GPUs and gloo on CPUs.
    gloo on GPUs is slow, but passes where NCCL finds no way."""

    dist_timeout_s: Annotated[Runtime[float], Field(gt=0, le=LONGEST_S)] = 3600.0
    """A collective that takes longer fails, in every process group. Rank 0 tokenizes and converts while the others wait, when
    training is started without prepared artifacts."""

    preflight_timeout_s: Annotated[Runtime[float], Field(ge=0, le=LONGEST_S)] = 60.0
    """The first collective, before anything loads, must be through within this time; 0 leaves it out."""

    stall_report_s: Annotated[Runtime[float], Field(ge=0, le=LONGEST_S)] = 600.0
    """A rank that stays in one phase longer than this is named in the log with its phase and where it stands; 0: never."""


class CheckpointConfig(Section):
    """What of a running training is saved."""

    save_steps: Annotated[Runtime[int], Field(gt=0)] = 50
    """A checkpoint every so many steps, and one at the end."""

    keep: Annotated[Runtime[int], Field(ge=2)] = 2
    """Newest checkpoints kept. Never fewer than two: the newest could be damaged."""

    keep_best: Runtime[str | None] = None
    """A metric, such as `val/reward/mean`: of the checkpoints saved with it, the one with the highest value is kept however old
    it is. null: none."""

    async_save: Runtime[bool] = True
    """Write checkpoints while the training goes on. It takes a copy of weights and moments in host memory, and the training waits
    until that is made, at the latest before the next update; false: no copy, and it waits until the checkpoint is committed."""

    must_save_by: Runtime[datetime | None] = None
    """When the machine goes away, `2026-12-24T18:00` (of the local clock, or with `+01:00`): the training saves and ends, with
    exit code 75, where another step might not be saved in time. null: the end of the SLURM job, if it is one."""
