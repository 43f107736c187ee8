"""Bytes of the rollout engine beside its weights."""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor

from rl_core.rollout.cache import Unsupported, layout_of
from rl_core.rollout.decode import _ROUND, PACKED
from rl_core.rollout.graphs import GraphRunner
from rl_core.rollout.sampling import sample
from rl_core.tools.plan_models import Model
from rl_core.tools.plan_trace import META, LiveBytes


@dataclass(frozen=True)
class Rollout:
    """Bytes of a rollout."""

    cache: int
    """Keys and values at their most."""
    stays: int
    """Of them what is held until the next rollout."""
    working: int
    """Most beside the cache."""


@cache
def rollout_bytes(model: Model, dtype: torch.dtype, rows: int, prompt: int, response: int) -> Rollout:
    """Of `rows` responses at a time, all of the greatest length: in slots or plainly, as `RolloutEngine` does it on a GPU."""
    causal: Any = model.empty(dtype)
    with LiveBytes() as counter:  # a condition on values has an answer only within
        try:
            layout = layout_of(causal)
        except Unsupported:
            layout = None
    del counter
    if layout is None or (layout.window is not None and prompt + response > layout.window):
        return _plainly(causal, rows, prompt, response)
    [(heads, width)] = layout.shapes
    size = GraphRunner.size(cast(GraphRunner, None), rows)
    capacity = -(-(prompt + response) // _ROUND) * _ROUND
    cached = 2 * len(layout.modules) * size * capacity * heads * width * dtype.itemsize
    packed = max(prompt - 1, min(rows * (prompt - 1), PACKED))
    working = max(_forward_peak(causal, 1, packed), _forward_peak(causal, size, 1))
    return Rollout(cached, cached, working)


def _forward_peak(causal: Any, rows: int, length: int) -> int:
    """Of packed prompts, or of one token for each row and its draw. (The kernels' draw takes less; a graph keeps room for it.)"""
    ids = torch.empty(rows, length, dtype=torch.long, device=META)
    with LiveBytes(ignored=[*causal.parameters(), *causal.buffers()]) as counter, torch.no_grad():
        logits = causal(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        if length == 1:
            _draw(logits)
    return counter.peak


def _plainly(causal: Any, rows: int, prompt: int, response: int) -> Rollout:
    """As `rl_core.rollout.plain`: the cache grows, and is gone afterwards."""
    from transformers import DynamicCache

    taken = signature(causal.forward).parameters
    extra: dict[str, Any] = {"cache" if "cache" in taken else "past_key_values": DynamicCache(config=causal.config)}
    if "logits_to_keep" in taken:
        extra["logits_to_keep"] = 1
    attended = torch.empty(rows, prompt + response, dtype=torch.long, device=META)

    def forward(first: int, last: int) -> Tensor:
        ids = torch.empty(rows, last - first, dtype=torch.long, device=META)
        return causal(
            input_ids=ids, attention_mask=attended[:, :last], position_ids=torch.empty_like(ids), use_cache=True, **extra
        ).logits[:, -1]

    # Prompts of different lengths need a mask, so a condition on the mask's values is taken for false.
    with LiveBytes(unknown=False, ignored=[*causal.parameters(), *causal.buffers()]) as counter, torch.no_grad():
        forward(0, prompt)
        most = counter.peak
        if response > 1:  # only the last step is looked at
            forward(prompt, prompt + response - 1)
        counter.restart()
        logits = forward(prompt + response - 1, prompt + response)
        cached = counter.live - logits.untyped_storage().nbytes()
    with LiveBytes(ignored=[logits]) as drawing:
        _draw(logits)
    most = max(most, counter.peak, counter.live + drawing.peak)
    return Rollout(cached, 0, most - cached)


def _draw(logits: Tensor) -> None:
    index = torch.empty(len(logits), dtype=torch.long, device=META)
    sample(logits, 1.0, seed=0, step=0, sample_index=index, position=index)
