"""How the ranks of a validation come to one verdict on each step, although a model may fail on one of them only."""

import itertools
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl_core.distributed import World
from rl_core.errors import ModelError, PpoflowError
from rl_core.preflight import listed

PATIENCE_SECONDS = 60.0
"""For the other ranks, after one has failed: those that do not come within it are stuck in a collective."""
_made = itertools.count()


@dataclass(frozen=True)
class Tried:
    """What a step came to, on one rank or on all."""

    found: str = ""
    error: str | None = None
    notes: tuple[str, ...] = ()
    took_part: bool = False


class Ranks:
    """Tries something on the ranks that take part and tells all of them what it came to.

    They tell each other through their store and not by a collective, since a model may fail on one rank while the others wait
    for it in a collective of its own.
    Made by all ranks together.
    """

    def __init__(self, world: World, patience: float = PATIENCE_SECONDS, limit: float = 3600.0) -> None:
        """`limit` is the time that a rank may take for a step, in seconds."""
        self._world, self._patience, self._limit, self._steps = world, patience, limit, 0
        self._store = None
        if world.size > 1:
            self._store = dist.PrefixStore(f"validate/{next(_made)}", distributed_c10d._get_default_store())

    def attempt(self, what: str, action: Callable[[], str] | None) -> Tried:
        """Call `action`, which says what it found, and learn what it came to on all ranks.

        Args:
            what: for the error.
            action: None on a rank that has no part in it.

        Returns:
            The same on all ranks.

        Raises:
            ModelError: it failed here, and the other ranks are stuck in what it left.
        """
        mine = Tried()
        if action is not None:
            with _listening() as said:
                try:
                    mine = Tried(action())
                except Exception as error:  # noqa: BLE001 – models bring code of their own, and this is to say what it raises
                    mine = Tried(error=_described(error))
            found = "; ".join(filter(None, [*(text for level, text in said if level == logging.INFO), mine.found]))
            notes = tuple(dict.fromkeys(text for level, text in said if level > logging.INFO))
            mine = Tried(found, mine.error, notes, took_part=True)
        return _merged(self._exchange(what, mine))

    def _exchange(self, what: str, mine: Tried) -> list[Tried]:
        if self._store is None:
            return [mine]
        self._steps += 1
        keys = [f"{self._steps}/{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], json.dumps(asdict(mine)))
        try:
            self._store.wait(keys, timedelta(seconds=self._limit if mine.error is None else self._patience))
        except RuntimeError:
            if mine.error is None:
                raise
            raise ModelError(
                f"{what} failed on rank {self._world.rank}, and the other ranks wait for it in a collective: {mine.error}"
            ) from None
        values = [json.loads(self._store.get(key)) for key in keys]
        return [Tried(**value | {"notes": tuple(value["notes"])}) for value in values]


def _merged(tried: list[Tried]) -> Tried:
    failed: dict[str, list[int]] = {}
    for rank, one in enumerate(tried):
        if one.error is not None:
            failed.setdefault(one.error, []).append(rank)
    alike = len(failed) == 1 and all(one.error is not None for one in tried if one.took_part)
    errors = [error if alike else f"{listed(ranks)}: {error}" for error, ranks in failed.items()]
    found = next((one.found for one in tried if one.found), "")
    notes = dict.fromkeys(note for one in tried for note in one.notes)
    return Tried(found, " ".join(errors) or None, tuple(notes))


def _described(error: Exception) -> str:
    """One paragraph; of an error that is not for users also where it was raised."""
    if isinstance(error, PpoflowError):
        return str(error)
    text = " ".join(str(error).split())[:400]
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{text} Less is needed with fsdp.activation_checkpointing, offload_policy, a lower "
            "trainer.per_device_train_batch_size, or more ranks."
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno}, in {frame.name})"


@contextmanager
def _listening() -> Iterator[list[tuple[int, str]]]:
    """What ppoflow's own code logs meanwhile (level and text), from INFO on; it is shown in the report instead."""
    said: list[tuple[int, str]] = []
    logger = logging.getLogger("rl_core")
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
