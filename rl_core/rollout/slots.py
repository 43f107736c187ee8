"""The rows that are being generated: one slot each, with all that decides what happens to it, on the device."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(eq=False)
class Slots:
    """State of S rows, which stay where they are in memory. A row that is not live is computed along and changes nothing."""

    token: Tensor
    """[S] long: the next input."""
    position: Tensor
    """[S] long: its place in the row, hence the number of tokens in the cache."""
    produced: Tensor
    """[S] long: tokens of the response so far."""
    limit: Tensor
    """[S] long: the longest response."""
    live: Tensor
    """[S] bool."""
    stopped: Tensor
    """[S] bool: the response has its end token."""
    bad: Tensor
    """[S] bool: its logits were not finite; not live any more."""
    stops: Tensor
    """[S, E] long: the row's end tokens, filled up with -1."""
    keys: Tensor
    """[S, 2] long: `sampling.row_keys`."""
    tokens: Tensor
    """[S, W] long: the response."""
    logprobs: Tensor
    """[S, W] float32."""

    @classmethod
    def empty(cls, size: int, width: int, ends: int, device: torch.device) -> "Slots":
        """S = `size` rows, none live, with W = `width` and E = `ends`."""

        def long(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        def flags() -> Tensor:
            return torch.zeros(size, dtype=torch.bool, device=device)

        return cls(
            token=long(size),
            position=long(size),
            produced=long(size),
            limit=long(size),
            live=flags(),
            stopped=flags(),
            bad=flags(),
            stops=long(size, ends) - 1,
            keys=long(size, 2),
            tokens=long(size, width),
            logprobs=torch.zeros(size, width, device=device),
        )

    def first(self, rows: int) -> "Slots":
        """Views of the first rows."""
        return Slots(*(getattr(self, column.name)[:rows] for column in fields(self)))

    def fill(self, slots: Tensor, token: Tensor, position: Tensor, limit: Tensor, stops: Tensor, keys: Tensor) -> None:
        """Begin responses in the slots [M]; the others are of M rows each."""
        self.token[slots], self.position[slots], self.limit[slots] = token, position, limit
        self.stops[slots], self.keys[slots] = stops, keys
        for column in (self.produced, self.stopped, self.bad):
            column[slots] = 0
        self.live[slots] = True

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows onto others, which are the ones to go on."""
        for column in fields(self):
            values = getattr(self, column.name)
            values[target] = values[source]
        self.live[source] = False


def advance(slots: Slots, token: Tensor, logprob: Tensor, finite: Tensor) -> None:
    """Append a token to each live row, in place; a row that is done is live no more.

    Args:
        slots: of B rows.
        token: [B] long.
        logprob: [B] float32.
        finite: [B] bool: whether the row's logits were all finite.
    """
    live = slots.live & finite
    here = (torch.arange(slots.tokens.shape[1], device=token.device) == slots.produced[:, None]) & live[:, None]
    slots.tokens.copy_(torch.where(here, token[:, None], slots.tokens))
    slots.logprobs.copy_(torch.where(here, logprob[:, None], slots.logprobs))
    slots.bad.logical_or_(slots.live & ~finite)
    slots.stopped.logical_or_(live & (token[:, None] == slots.stops).any(1))
    slots.token.copy_(torch.where(live, token, slots.token))
    slots.produced.add_(live)
    slots.position.add_(live)
    slots.live.copy_(live & ~slots.stopped & (slots.produced < slots.limit))
