"""A model in a run, on the ranks that hold it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.config import Config, schema
from rl_core.groups import Group
from rl_core.models.offload import Offload


class Role:
    """Actor, critic, reference or reward model.

    Attributes:
        name: `actor`, `critic`, `ref` or `reward`.
        module: None on ranks that have no part in it.
        group: its ranks.
    """

    def __init__(
        self,
        name: schema.Role,
        module: Any,
        group: Group,
        config: Config,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        assert (module is None) == (group.rank is None), f"{name}: a module on the ranks of its group and nowhere else"
        self.name, self.module, self.group = name, module, group
        self._offload = None if module is None else Offload(module, optimizer, config.fsdp_of(name), device)

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        """Around every use: what is offloaded is on the device within the block.

        Args:
            optimizer: bring its moments too.
        """
        if self._offload is None:
            yield
            return
        with self._offload.loaded(optimizer=optimizer):
            yield

    def share(self, result: Tensor) -> Tensor:
        """Give all ranks what the ranks of the role computed. Collective over all ranks.

        Args:
            result: zero except where this rank computed; the same shape on all ranks.

        Returns:
            The whole, the same on all ranks.
        """
        if not self.group.reports:
            result = torch.zeros_like(result)
        dist.all_reduce(result)  # each element comes from one rank: no rounding
        return result
