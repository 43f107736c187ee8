"""Bytes that a forward and a backward hold, counted while the real modules run on the meta device: no memory, no values.

A meta tensor knows its shape and type, and autograd keeps the same ones that it would keep on a GPU. So the bytes of the living
storages are those of the GPU's tensors, for any model, without a formula for each. Two things have to be put in place of values:
a condition that depends on them is taken for `unknown`, and `nonzero` finds every element (the largest batch has no padding).
Attention is counted as in CUDA's fused kernels (`use_fused_attention`); torch itself takes the unfused one for meta tensors.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FUSED = "ppoflow_fused_on_meta"
"""The attention's name with transformers."""
META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Within, the bytes of all storages that operations make and something still refers to.

    Attributes:
        live: bytes now.
        peak: most bytes so far.
        made: elements of the gradients that are complete (see `collect_gradients`).
        most: by `made`, the most bytes while it was so.
    """

    def __init__(self, unknown: bool = True, ignored: Sequence[Tensor] = ()) -> None:
        """
        Args:
            unknown: what a condition is taken for that depends on values.
            ignored: tensors that do not count, although operations may return them (parameters, buffers).
        """
        super().__init__()
        self._unknown = unknown
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in ignored}
        self._watched: dict[int, weakref.ref] = {}
        self._ignored = ignored  # their addresses must not be given to others
        self.live = self.peak = self.made = 0
        self.most: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._unknown if args[0].dtype is torch.bool else 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            result = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.long, device=META)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def restart(self) -> None:
        """Forget the peak so far; what lives goes on counting."""
        self.peak = self.live

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = size = storage.nbytes()
        self.live += size
        self._watched[key] = weakref.ref(storage, partial(self._freed, key))
        self.peak = max(self.peak, self.live)
        self.most[self.made] = max(self.most.get(self.made, 0), self.live)

    def _freed(self, key: int, _: Any) -> None:
        del self._watched[key]
        self.live -= self._known.pop(key)


def collect_gradients(module: nn.Module, counter: LiveBytes) -> Callable[[], None]:
    """Drop each parameter's gradient once it is complete and count its elements: where it goes from there is FSDP's affair.

    Returns:
        What takes the hooks away again.
    """

    def complete(parameter: Tensor) -> None:
        counter.made += parameter.numel()
        parameter.grad = None

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(complete) for parameter in trained]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


def use_fused_attention(causal: "PreTrainedModel") -> None:
    """Let a model that would call torch's scaled dot product attention keep what CUDA's kernels keep. Eager attention, and models
    that have no interface for another, stay as they are."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if causal.config._attn_implementation == "eager" or not causal._supports_attention_backend:
        return
    AttentionInterface.register(FUSED, _attention)
    AttentionMaskInterface.register(FUSED, AttentionMaskInterface()["sdpa"])
    causal.set_attn_implementation(FUSED)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa`: [B, heads, T, width] → [B, T, heads, width]."""
    bias = query.new_empty(0)
    if attention_mask is not None:  # not the flash kernel then but the memory-efficient one: an additive mask, all heads of keys
        groups = getattr(module, "num_key_value_groups", 1)
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        bias = torch.empty(attention_mask.shape, dtype=query.dtype, device=query.device)
    return _Fused.apply(query, key, value, bias).transpose(1, 2).contiguous(), None


class _Fused(torch.autograd.Function):
    """What CUDA's flash and memory-efficient kernels allocate: the output, and a float32 log-sum-exp for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        result = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        normaliser = query.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, result, normaliser)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        accumulated = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        wide = [query.new_empty(*query.shape[:3], part.shape[-1]) for part in (key, value)]  # per query head, summed over groups
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
        del accumulated, wide
        return result
