"""Which ranks hold which role (`model_mapping`), and how the ranks of a role are laid out for sharding and sequences."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_core.config import Config
from rl_core.config.fsdp import FsdpConfig
from rl_core.config.schema import Role
from rl_core.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """The ranks of a role, as this rank sees them.

    Consecutive ranks share a sequence (`sequence_parallel` of them), the others are data parallel; all of them share the
    parameters.
    """

    ranks: tuple[int, ...]
    """Global ranks, in order."""
    rank: int | None
    """This rank's place among them; None where it has no part."""
    mesh: DeviceMesh
    """For `fully_shard`: one-dimensional (fsdp), or replicas × shards (ddp, hsdp)."""
    process_group: dist.ProcessGroup | None
    """Of all ranks of the role; None where this rank has no part."""
    sequence_parallel: int = 1
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences; None without sequence parallelism."""

    @property
    def size(self) -> int:
        """Ranks of the role."""
        return len(self.ranks)

    @property
    def data_parallel(self) -> int:
        """How many parts the responses are divided into."""
        return self.size // self.sequence_parallel

    @property
    def part(self) -> int:
        """Which of these parts is this rank's."""
        assert self.rank is not None
        return self.rank // self.sequence_parallel

    @property
    def reports(self) -> bool:
        """Whether this rank's results count: those of the first of the ranks that share a sequence."""
        return self.rank is not None and self.rank % self.sequence_parallel == 0


def make_groups(config: Config, roles: Sequence[Role], device_type: str) -> dict[Role, Group]:
    """The group of each role. Collective over all ranks.

    Raises:
        ConfigError: a mapping names ranks that do not exist, or a size does not divide a number of ranks.
    """
    world = dist.get_world_size()
    _check_all_used(config, roles, world)
    made: dict[tuple[object, ...], Group] = {}
    groups: dict[Role, Group] = {}
    for role in roles:
        ranks, fsdp = ranks_of(config, role, world), config.fsdp_of(role)
        layout = _layout(role, len(ranks), fsdp)
        key = (ranks, layout, fsdp.ulysses_sequence_parallel_size)
        if key not in made:
            made[key] = _make(ranks, layout, fsdp.ulysses_sequence_parallel_size, device_type)
        groups[role] = made[key]
    return groups


def ranks_of(config: Config, role: Role, world: int) -> tuple[int, ...]:
    """The ranks that `model_mapping` gives a role.

    Raises:
        ConfigError: they are not ranks of this run.
    """
    mapping = config.model_mapping
    stated = getattr(mapping, role)
    if role == "ref" and stated is None:
        stated = mapping.actor
    if stated is None:
        return tuple(range(world))
    where = f"model_mapping.{role}"
    if not stated or len(set(stated)) != len(stated):
        raise ConfigError(f"{where} = {stated} must name at least one rank, each once.")
    if max(stated) >= world:
        raise ConfigError(
            f"{where} = {stated} names rank {max(stated)}, but this run has ranks 0 to {world - 1}. "
            f"Start {max(stated) + 1} ranks (launch.nproc_per_node), or change the mapping."
        )
    return tuple(sorted(stated))


def _check_all_used(config: Config, roles: Sequence[Role], world: int) -> None:
    """Raises ConfigError for a rank that has no role at all: a GPU would be idle for the whole run."""
    idle = set(range(world)) - {rank for role in roles for rank in ranks_of(config, role, world)}
    if idle:
        raise ConfigError(
            f"model_mapping gives no role to rank(s) {', '.join(map(str, sorted(idle)))} of {world}. Add them to a role, or "
            "start fewer ranks (launch.nproc_per_node)."
        )


def _layout(role: Role, size: int, fsdp: FsdpConfig) -> tuple[int, int]:
    """(replicas, ranks that share a replica)."""
    where = f"{'ref_model' if role == 'ref' else role}.fsdp"
    sequence = fsdp.ulysses_sequence_parallel_size
    if size % sequence:
        raise ConfigError(f"{where}.ulysses_sequence_parallel_size = {sequence} does not divide the {size} rank(s) of the role.")
    if fsdp.strategy == "single" and size != 1:
        raise ConfigError(
            f"{where}.strategy = single is for one rank, but the role has {size}. Use ddp or fsdp, or start one rank "
            "(launch.nproc_per_node: 1)."
        )
    if fsdp.strategy == "ddp":
        return size, 1
    if fsdp.strategy == "hsdp":
        shards = fsdp.hsdp_group_size or min(size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if size % shards:
            raise ConfigError(f"{where}.hsdp_group_size = {shards} does not divide the {size} rank(s) of the role.")
        return size // shards, shards
    return 1, size


def _make(ranks: tuple[int, ...], layout: tuple[int, int], sequence: int, device_type: str) -> Group:
    me, grid = dist.get_rank(), torch.tensor(ranks)
    if layout[0] == 1:
        mesh = DeviceMesh(device_type, grid, mesh_dim_names=("shard",))
    else:
        mesh = DeviceMesh(device_type, grid.view(layout), mesh_dim_names=("replicate", "shard"))
    process_group = dist.new_group(list(ranks))
    sequence_group = None
    if sequence > 1:
        for shared in grid.view(-1, sequence).tolist():
            group = dist.new_group(shared)
            sequence_group = group if me in shared else sequence_group
    rank = ranks.index(me) if me in ranks else None
    return Group(ranks, rank, mesh, process_group if rank is not None else None, sequence, sequence_group)
