"""A static key/value cache, and the attention function through which an unmodified transformers module reads and writes it.

Each layer keeps [slots, capacity, kv_heads, head_dim] of keys and of values. A row of the batch lives in a slot, its tokens from
place 0 on, whatever the other rows hold: no padding on the left, no mask. The attention modules call `attend` by its name in
transformers' AttentionInterface; what is to be done – prompts packed one after the other, or one token for each of the first
rows – stands in the `Rows` that all layers of a model share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTENTION = "ppoflow_rollout"
"""Name in transformers' AttentionInterface. No mask is registered under it, so that transformers makes none."""


class Unsupported(Exception):
    """The model needs something that `attend` has not."""


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass(eq=False)
class Rows:
    """What the layers are to do in the forward that follows."""

    kernels: bool = False
    """Whether the GPU kernels of `rl_core.rollout.kernels` take the work."""
    decoding: bool = False
    """One token for each of the rows 0 … B - 1; else packed prompts."""
    places: Tensor = field(default_factory=_none)
    """Where each token goes in its slot: [B] when decoding, else [T]."""
    slots: Tensor = field(default_factory=_none)
    """[T] slot of each packed token, or [B] numbers of the rows."""
    seen: Tensor = field(default_factory=_none)
    """[B, 1, 1, L] bool: which of the first L places each row attends to. Decoding without kernels only."""
    bounds: Tensor = field(default_factory=_none)
    """[prompts + 1] int32: where each packed prompt begins, and the end."""
    cuts: tuple[int, ...] = ()
    """`bounds` as numbers, where no kernel reads them."""
    longest: int = 0
    """Tokens of the longest packed prompt, or more."""


@dataclass(eq=False)
class Layer:
    """One attention module's part of the cache, kept in that module as `rollout`."""

    rows: Rows
    keys: Tensor
    """[slots, capacity, kv_heads, head_dim]"""
    values: Tensor


@dataclass(eq=False)
class Layout:
    """The attention modules of a model in the order of their calls, and what each keeps of a token."""

    modules: list[nn.Module] = field(default_factory=list)
    shapes: set[tuple[int, int]] = field(default_factory=set)
    """(kv_heads, head_dim)"""
    window: int | None = None
    """Tokens that the shortest-sighted layer attends to; None: all."""

    def see(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> None:
        """Note a call.

        Raises:
            Unsupported: the module wants more than causal attention, or no two layers are alike.
        """
        if not getattr(module, "is_causal", True):
            raise Unsupported("its attention is not causal")
        if unknown := sorted(name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None):
            raise Unsupported(f"its attention takes {', '.join(unknown)}")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise Unsupported("its keys and values are not alike")
        if any(module is other for other in self.modules):
            raise Unsupported("an attention module is used twice")
        self.modules.append(module)
        self.shapes.add((key.shape[1], key.shape[3]))
        if len(self.shapes) > 1:
            raise Unsupported("its layers are not alike")
        window = settings.get("sliding_window")
        if window is not None:
            self.window = min(window, self.window or window)


_recording: list[Layout] = []


def layout_of(model: Any) -> Layout:
    """Find the attention modules of a causal language model by a forward of a few tokens (whatever its weights are).

    Raises:
        Unsupported: `attend` cannot serve it; the reason, to be said of the model.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported("its attention is not called by transformers' AttentionInterface")
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        raise Unsupported("it has layers other than causal attention")
    rotary = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    if any(kind in name for name in rotary for kind in ("dynamic", "longrope")):
        raise Unsupported("its rotary frequencies depend on the length of the text")
    layout = Layout()
    _recording.append(layout)
    try:
        with attending(config), torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
            model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False, logits_to_keep=1)
    except TypeError as error:  # a class that takes no position_ids or logits_to_keep
        raise Unsupported(str(error)) from error
    finally:
        _recording.remove(layout)
    if len(layout.modules) != config.num_hidden_layers:
        raise Unsupported(f"{len(layout.modules)} of its {config.num_hidden_layers} layers call transformers' AttentionInterface")
    return layout


@contextmanager
def attending(config: Any) -> Iterator[None]:
    """Within, the model with that transformers configuration calls `attend`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    usual, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = usual


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **settings: Any
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the attention module; its `rollout` is the `Layer`.
        query, key, value: [B, heads, 1, D] when decoding, [1, heads, T, D] for packed prompts; a key/value head may serve
            several query heads.
        attention_mask: ignored.
        scaling: of the scores; None: 1 / sqrt(D).

    Returns:
        [B, 1, heads, D] or [1, T, heads, D], and None.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _recording:
        _recording[-1].see(module, query, key, value, settings)
        return _causal(query, key, value, scale), None
    layer: Layer = module.rollout
    rows = layer.rows
    if rows.decoding:
        q, k, v = query[:, :, 0], key[:, :, 0], value[:, :, 0]
        if rows.kernels:
            out = torch.ops.ppoflow.decode_attention(q, k, v, layer.keys, layer.values, rows.places, scale)
        else:
            out = _decode(q, k, v, layer, scale)
        return out[:, None], None
    if rows.kernels:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        held = layer.keys, layer.values, rows.slots, rows.places
        return torch.ops.ppoflow.prefill_attention(q, k, v, *held, rows.bounds, rows.longest, scale)[None], None
    layer.keys[rows.slots, rows.places] = key[0].transpose(0, 1)
    layer.values[rows.slots, rows.places] = value[0].transpose(0, 1)
    parts = [_causal(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale) for a, b in pairwise(rows.cuts)]
    return torch.cat(parts, dim=1), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[B, heads, T, D] -> [B, T, heads, D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)


def _decode(q: Tensor, k: Tensor, v: Tensor, layer: Layer, scale: float) -> Tensor:
    """Write and attend for one token a row: q [B, heads, D], k and v [B, kv_heads, D] -> [B, heads, D]."""
    rows, length = layer.rows, layer.rows.seen.shape[-1]
    layer.keys[rows.slots, rows.places] = k
    layer.values[rows.slots, rows.places] = v
    keys, values = (held[: len(q), :length].transpose(1, 2) for held in (layer.keys, layer.values))
    # The query heads of a key/value head take the place of positions, so that nothing is repeated.
    grouped = q.unflatten(1, (k.shape[1], -1))
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.seen, scale=scale).flatten(1, 2)
