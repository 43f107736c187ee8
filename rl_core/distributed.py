"""The ranks of a training: who am I, on which device, and the few collectives that the loop needs."""

import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl_core import stall
from rl_core.config.trainer import LaunchConfig
from rl_core.digests import digest_json
from rl_core.errors import ConfigError
from rl_core.preflight import Preflight, first_collective

BACKEND_VARIABLE = "TORCH_DISTRIBUTED_BACKEND"


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0 writes logs, metrics and manifests."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, as a new tensor on the same device."""
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: all ranks get the same answer."""
        return bool(self.sum(torch.tensor(int(flag))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in order on rank 0, [] elsewhere."""
        values: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(value, values if self.is_main else None)
        return values


@contextmanager
def joined(launch: LaunchConfig) -> Iterator[World]:
    """Join the ranks that torchrun started (a process started without torchrun is a world of one).

    On an error the group is left as it is, without another collective, so that a dead rank cannot hang the others.

    Raises:
        ConfigError: `launch` or the environment asks for what this host does not have.
        LaunchError: the ranks do not find each other within `launch.preflight_timeout_s`.
    """
    stall.enter("launch")
    rank, size = place(os.environ)
    device = _device(launch)
    backend = backend_of(launch, device.type, os.environ)
    timeout = timedelta(seconds=launch.dist_timeout_s)
    preflight = Preflight(rank, size, backend, launch.preflight_timeout_s or launch.dist_timeout_s)
    store = preflight.connect() if "WORLD_SIZE" in os.environ else dist.HashStore()

    def join() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a setting of the thread
        dist.init_process_group(backend, timeout=timeout, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=size)

    def join_and_try() -> None:
        join()
        first_collective(device)

    if launch.preflight_timeout_s:
        meeting = dist.PrefixStore("preflight", store)
        preflight.meet(meeting)
        preflight.through(meeting, join_and_try)
    else:
        join()
    store.set_timeout(timeout)
    stall.enter("start")
    yield World(rank, size, device)
    dist.destroy_process_group()


def set_timeouts(seconds: float) -> None:
    """Let a collective of any process group that exists now fail after `seconds`.

    Groups made later, by `new_group` or `DeviceMesh`, begin with torch's own constant (10 or 30 minutes), whatever the first
    group was given: call it again after making some.
    """
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def place(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks), as torchrun leaves them in the environment.

    Raises:
        ConfigError: half of what torchrun leaves is there, or srun started several programs that know nothing of each other.
    """
    if "WORLD_SIZE" not in environment:
        tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
        if "SLURM_PROCID" in environment and tasks != "1":
            raise ConfigError(
                f"srun started {tasks} programs that know nothing of each other. Let it start one torchrun per node, as "
                "infra/slurm/train.sbatch does."
            )
        return 0, 1
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if not environment.get(name)]:
        raise ConfigError(f"The environment has WORLD_SIZE, but no {', '.join(missing)}. Start the ranks with torchrun.")
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


def backend_of(launch: LaunchConfig, device_type: str, environment: Mapping[str, str]) -> str:
    """torch's name of the communication: gloo, or gloo between CPUs and NCCL between GPUs.

    Raises:
        ConfigError: another backend is named, or NCCL without GPUs.
    """
    named = environment.get(BACKEND_VARIABLE, "").strip().lower()
    where, backend = ("launch.dist_backend", launch.dist_backend) if launch.dist_backend else (BACKEND_VARIABLE, named)
    backend = backend or ("nccl" if device_type == "cuda" else "gloo")
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"{where} = {backend}: it can be nccl or gloo; unset it to have the right one chosen.")
    if backend == "nccl" and device_type != "cuda":
        raise ConfigError(f"{where} = nccl needs GPUs, but this run is on the CPU. Use gloo, or unset it.")
    return "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"


def _device(launch: LaunchConfig) -> torch.device:
    if launch.device == "cpu" or (launch.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("launch.device = cuda, but torch sees no GPU. Use launch.device = auto or cpu.")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is '{visible}': numbers with commas between them)"
        raise ConfigError(
            f"There are at least {local + 1} ranks on {socket.gethostname()}, which has {count} GPU(s){shown}. Use at most one "
            "rank per GPU: launch.nproc_per_node, or torchrun's --nproc_per_node."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def seed_global_generators(*parts: int) -> None:
    """Seed Python's, NumPy's and torch's global generators from `parts`.

    ppoflow itself draws from counters, never from these. Seeding them afresh at each step makes a user's reward function
    that draws from them give the same after a resume as without one.
    """
    import numpy

    number = int(digest_json(list(parts))[:8], 16)
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
