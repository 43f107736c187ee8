"""Sequence parallelism (DeepSpeed-Ulysses, arXiv:2309.14509): the ranks of a sequence group share the positions of each row.

A rank holds [B, T / ranks] positions in all layers. Only attention needs the others': there an all-to-all gives each rank all
positions of its share of the heads, the model's own attention function runs on them, and a second all-to-all undoes the first.
So the activations of a row are divided by the number of ranks, and the sizes of neither heads nor model matter otherwise.

A loss is computed by each rank from the scores of all response tokens, but its gradient flows on a rank only through the scores
that the rank computed itself: parameter gradients must be *summed* over the ranks of the group, as over data-parallel ranks.
"""

import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "fsdp.ulysses_sequence_parallel_size"
PATTERNS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers (transformers' `layer_types`) in which nothing but a causal attention mixes positions."""
_numbers = count()


def enable(causal: "PreTrainedModel", process_group: dist.ProcessGroup) -> None:
    """Let the attention of `causal` exchange positions and heads within `process_group`, in the recomputing backward too.

    Registers an attention function (and its masks) under a name of its own with transformers and sets it in the model's
    configuration; from then on the model takes slices of rows, as `last_hidden_states` gives them.

    Args:
        causal: a transformers causal language model, on any device, not wrapped yet.
        process_group: the ranks that share a row, of which this is one.

    Raises:
        ConfigError: the attention heads cannot be divided among the ranks, or the model mixes positions elsewhere than in
            transformers' attention functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    size = dist.get_world_size(process_group)
    _check(causal, size)
    # The name is what tells apart the groups and kernels of several models in one process.
    name = f"ulysses_{next(_numbers)}"
    AttentionInterface.register(name, partial(_attention, process_group, _kernel(causal)))
    AttentionMaskInterface.register(name, partial(_mask, size, AttentionMaskInterface()[causal.config._attn_implementation]))
    causal.set_attn_implementation(name)
    if causal.config._attn_implementation != name:
        raise _no_interface(causal)


def last_hidden_states(
    backbone: nn.Module, input_ids: Tensor, process_group: dist.ProcessGroup | None
) -> tuple[Tensor, range | None]:
    """Run a transformers backbone on this rank's slice of the positions. Collective over the group.

    Args:
        input_ids: [B, T], the same on all ranks of the group, rows padded on the right.
        process_group: that given to `enable`; None runs the whole rows here.

    Returns:
        The last hidden states [B, T or T / ranks rounded up, hidden], and the positions that they belong to (None: all).
        The last positions may lie beyond T.
    """
    if process_group is None:
        return backbone(input_ids=input_ids, use_cache=False).last_hidden_state, None
    size, length = dist.get_world_size(process_group), input_ids.shape[1]
    share = -(-length // size)
    here = range(dist.get_rank(process_group) * share, (dist.get_rank(process_group) + 1) * share)
    ids = functional.pad(input_ids, (0, share * size - length))[:, here.start : here.stop]
    # Pads repeat the last position: a model with a table of positions may have no more of them.
    positions = torch.arange(here.start, here.stop, device=ids.device).clamp(max=length - 1)[None]
    # The mask of ones keeps transformers from taking repeated positions for the start of another text.
    states = backbone(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
    return states.last_hidden_state, here


def sum_over_ranks(scores: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """Put together scores of which each rank of the group computed some and has zeros for the others. Collective.

    Returns:
        The sum; its gradient flows into this rank's own scores as it is.
    """
    return scores if process_group is None else _Sum.apply(scores, process_group)


def _check(causal: "PreTrainedModel", size: int) -> None:
    if not causal._supports_attention_backend or "position_ids" not in inspect.signature(causal.base_model.forward).parameters:
        raise _no_interface(causal)
    config, name = causal.config.get_text_config(), type(causal).__name__
    heads = config.num_attention_heads
    if heads % size:
        valid = ", ".join(str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0)
        raise ConfigError(f"{KEY} = {size} does not divide the {heads} attention heads of {name}. Valid values: {valid}.")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - PATTERNS)
    if other or causal._is_stateful:
        raise ConfigError(
            f"{KEY} = {size}: {name} has layers other than causal attention ({', '.join(other) or 'recurrent'}), which need all "
            "positions of a row. Set it to 1."
        )
    if any(hasattr(module, "sinks") for module in causal.modules()):
        raise ConfigError(f"{KEY} = {size}: {name} has a parameter of its own for each head (attention sinks). Set it to 1.")
    if kinds := _rope_types(getattr(config, "rope_parameters", None)) & {"dynamic", "longrope"}:
        raise ConfigError(
            f"{KEY} = {size}: the rotary frequencies of {name} (rope_type {kinds.pop()}) depend on the length of the row, of "
            "which each rank would see only its own part. Set it to 1."
        )


def _kernel(causal: "PreTrainedModel") -> Callable[..., tuple[Tensor, Any]]:
    """The attention function that the model has so far; `eager` ones stand in the file of the model's class."""
    from transformers import AttentionInterface

    kernel = causal.config._attn_implementation
    eager = getattr(sys.modules[type(causal).__module__], "eager_attention_forward", None)
    if kernel == "sdpa":
        return AttentionInterface()["sdpa"]
    if kernel == "eager" and eager is not None:
        return eager
    possible = "sdpa" if eager is None else "sdpa or eager"
    raise ConfigError(
        f"{KEY} goes with model.attn_implementation = {possible} for {type(causal).__name__}, not {kernel}. Set that to sdpa, or "
        "this to 1."
    )


def _no_interface(causal: "PreTrainedModel") -> ConfigError:
    return ConfigError(
        f"{KEY} needs a model whose attention is called by transformers' AttentionInterface and that takes position_ids; "
        f"{type(causal).__name__} is none. Set it to 1 – or, if you wrote the model: call ALL_ATTENTION_FUNCTIONS.get_interface("
        "config._attn_implementation, …) in its attention layers and set _supports_attention_backend = True in its class."
    )


def _rope_types(parameters: Any) -> set[str]:
    """Of `rope_parameters`, which may be given for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    return set().union({parameters.get("rope_type", "default")}, *nested)


def _attention(
    process_group: dist.ProcessGroup,
    attend: Callable[..., tuple[Tensor, Any]],
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, heads, T / ranks, D], key and value alike -> [B, T / ranks, heads, D]."""
    size, heads, groups = dist.get_world_size(process_group), query.shape[1], key.shape[1]
    assert heads % size == 0, f"{heads} heads on {size} ranks"
    # Where the ranks do not divide the key/value heads, each of these is repeated just as often as makes them.
    repeats = size // math.gcd(groups, size)
    seen: Any = layer
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        seen = _Regrouped(layer, heads // (groups * repeats))
    settings.pop("position_ids", None)  # the slice's; kernels that look at them need none for unpacked rows
    query, key, value = (_exchange(states, process_group) for states in (query, key, value))
    output, _ = attend(seen, query, key, value, attention_mask, **settings)
    return _exchange(output, process_group), None


def _mask(size: int, mask: Callable[..., Tensor | None], q_length: int, kv_length: int, **settings: Any) -> Tensor | None:
    """transformers' mask function, for the whole row: None where causality is all that there is to it."""
    return mask(q_length=q_length * size, kv_length=kv_length * size, **(settings | {"attention_mask": None}))


class _Regrouped:
    """An attention layer as its attention function sees it, with another number of query heads per key/value head."""

    def __init__(self, layer: nn.Module, groups: int) -> None:
        self._layer = layer
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _exchange(states: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """[B, M, N, D] -> [B, M / ranks, N · ranks, D]: this rank's share of dimension 1, and everybody's of dimension 2."""
    parts = states.unflatten(1, (dist.get_world_size(process_group), -1)).movedim(1, 0)
    return _AllToAll.apply(parts.contiguous(), process_group).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """[ranks, …]: part i goes to rank i. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=process_group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.process_group)
        return received, None


class _Sum(torch.autograd.Function):
    """All-reduce whose gradient is that of this rank's own part."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        total = scores.clone()
        dist.all_reduce(total, group=process_group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
