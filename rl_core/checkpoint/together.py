"""Something that can fail on one rank, done so that it then fails on all of them and leaves none waiting."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rl_core.errors import StoreError

T = TypeVar("T")


def together(action: Callable[[], T]) -> T:
    """Call `action` on this rank and wait until all ranks have called theirs. Collective where torch.distributed is initialised.

    Raises:
        Exception: what `action` raised here.
        StoreError: it raised on another rank only.
    """
    if not dist.is_initialized():
        return action()
    failed: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 – raised below, once the other ranks know
        failed = error
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise StoreError(f"rank {rank} failed ({reason}).")
    return result
