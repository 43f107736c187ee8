"""Something that can fail on one rank, done so that it then fails on all of them and leaves none waiting."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rl_core import errors
from rl_core.errors import PpoflowError

T = TypeVar("T")


def together(action: Callable[[], T], process_group: dist.ProcessGroup | None = None) -> T:
    """Call `action` on this rank and wait until all ranks have called theirs. Collective where torch.distributed is initialised.

    Args:
        process_group: the ranks that take part; None: all.

    Raises:
        Exception: what `action` raised here.
        PpoflowError: it raised on another rank only. An error for users has the class and message that it has there, so that
            all ranks end alike.
    """
    if not dist.is_initialized():
        return action()
    failed: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 – raised below, once the other ranks know
        failed = error
    reasons: list[tuple[str, str] | None] = [None] * dist.get_world_size(process_group)
    said = None if failed is None else (type(failed).__name__, str(failed))
    try:
        dist.all_gather_object(reasons, said, group=process_group)
    except RuntimeError:
        if failed is None:
            raise
    if failed is not None:  # also where the others could not be told, since they are gone: this is why
        raise failed
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise _rebuilt(rank if process_group is None else dist.get_global_rank(process_group, rank), *reason)
    return result


def _rebuilt(rank: int, name: str, message: str) -> PpoflowError:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PpoflowError):
        return kind(message)
    return PpoflowError(f"rank {rank} failed ({name}: {message}).")
