"""The ranks of a training: who am I, on which device, and the few collectives that the loop needs."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_core.config.trainer import LaunchConfig
from rl_core.digests import digest_json
from rl_core.errors import ConfigError

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Rank 0 tokenizes and converts while the others wait, when training is started without prepared artifacts."""


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

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
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = launch.device == "cuda" or (launch.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError("launch.device = cuda, but torch sees no GPU. Use launch.device = auto or cpu.")
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"launch.nproc_per_node asks for at least {local + 1} ranks on this host, which has {torch.cuda.device_count()} "
                "GPU(s); use at most one rank per GPU."
            )
        torch.cuda.set_device(local)
        device, backend = torch.device("cuda", local), "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, store=dist.HashStore(), rank=0, world_size=1)
    yield World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("dp",)))
    dist.destroy_process_group()


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
