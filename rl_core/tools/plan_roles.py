"""The roles of a run on one of their ranks: what each holds, at rest and at work."""

from dataclasses import dataclass

import torch

from rl_core.config import Config
from rl_core.config.fsdp import FsdpConfig
from rl_core.config.roles import TrainedRoleConfig
from rl_core.config.schema import Role
from rl_core.groups import _layout, ranks_of
from rl_core.optimizers import BLOCK
from rl_core.tools.plan_models import Model, Part, Sizes, sizes

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is planned for: a settled configuration, its models, so many ranks and the longest rows."""

    config: Config
    model: Model
    judge: Model | None
    """The reward model."""
    ranks: int
    per_node: int
    prompt: int
    """Tokens of the longest prompt."""

    @property
    def roles(self) -> list[Role]:
        """Of the run."""
        return self.config.roles()


@dataclass(frozen=True)
class Held:
    """A role on one of its ranks."""

    role: Role
    part: Part
    sizes: Sizes
    fsdp: FsdpConfig
    shards: int
    """Ranks over which its parameters are spread."""
    data_parallel: int
    sequence: int
    size: int
    """Ranks of the role."""
    eight_bit: bool

    @property
    def itemsize(self) -> int:
        """Of what it computes in."""
        return self.part.dtype.itemsize

    @property
    def trained_itemsize(self) -> int:
        """Of the trained parameters at rest, their gradients and moments."""
        return FLOAT32 if self.part.lora is not None else getattr(torch, self.fsdp.master_dtype).itemsize

    @property
    def reduce_itemsize(self) -> int:
        """Of gradients that are summed."""
        return getattr(torch, self.fsdp.mixed_precision.reduce_dtype).itemsize

    @property
    def whole(self) -> int:
        """Elements of the model without adapters, as rollout engine and export have it."""
        return self.sizes.all - (self.sizes.trained if self.part.lora is not None else 0)

    @property
    def parameters(self) -> int:
        """Bytes of this rank's share at rest."""
        frozen = self.sizes.all - self.sizes.trained
        return frozen * self.itemsize // self.shards + self.parameters_trained

    @property
    def parameters_trained(self) -> int:
        """Of these what the optimizer moves; gradients are as large."""
        return self.sizes.trained * self.trained_itemsize // self.shards

    @property
    def moments(self) -> int:
        """Bytes of the optimizer's state between steps."""
        if self.eight_bit:
            return int(self.sizes.trained * 2 * (1 + FLOAT32 / BLOCK)) // self.shards
        return 2 * self.sizes.trained * self.trained_itemsize // self.shards

    @property
    def whole_moments(self) -> int:
        """Bytes of the optimizer's state when it is saved or made."""
        return 2 * self.sizes.trained * (FLOAT32 if self.eight_bit else self.trained_itemsize) // self.shards

    @property
    def gathered(self) -> int:
        """Bytes of gathered parameters while it computes: root and unit at work, or all of them where they are not freed. With
        several ranks the next unit is on its way, in one piece and then copied out."""
        if not self.fsdp.reshard_after_forward:
            return self.sizes.all * self.itemsize
        return (self.sizes.root + self._units * self.sizes.unit) * self.itemsize

    @property
    def _units(self) -> int:
        return (1 if self.shards == 1 else 3) + self.fsdp.forward_prefetch

    @property
    def reducing(self) -> int:
        """Bytes of a unit's gradients on their way to where they are kept: as computed, and the input and output of the sum."""
        unit = self.sizes.unit_trained
        return unit * (self.itemsize + self.reduce_itemsize + self.reduce_itemsize // self.shards)


def held(situation: Situation, role: Role) -> Held:
    """A role as each of its ranks has it. Raises ConfigError as `rl_core.groups.make_groups`."""
    config = situation.config
    fsdp, own = config.fsdp_of(role), config.role(role)
    size = len(ranks_of(config, role, situation.ranks))
    trains = isinstance(own, TrainedRoleConfig)
    adapters = own.lora if isinstance(own, TrainedRoleConfig) else None
    model = situation.judge if role == "reward" else situation.model
    assert model is not None
    part = Part(
        model,
        role in ("critic", "reward"),
        trains,
        adapters.model_dump_json() if adapters is not None else None,
        FsdpConfig(
            wrap_policy=fsdp.wrap_policy,
            activation_checkpointing=fsdp.activation_checkpointing,
            activation_cpu_offload=fsdp.activation_cpu_offload,
        ).model_dump_json(),
        getattr(torch, config.dtype_of(role)),
    )
    in_groups = fsdp.model_copy(update={"hsdp_group_size": fsdp.hsdp_group_size or min(size, situation.per_node)})
    _, shards = _layout(role, size, in_groups)
    sequence = fsdp.ulysses_sequence_parallel_size
    eight_bit = isinstance(own, TrainedRoleConfig) and own.optimizer == "adamw8bit"
    return Held(role, part, sizes(part.keeping), fsdp, shards, size // sequence, sequence, size, eight_bit)
