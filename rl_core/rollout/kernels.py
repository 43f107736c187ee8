"""GPU kernels (Triton, which comes with torch for CUDA): attention of one token a row over the static cache, and the draw.

`decode_attention` and `prefill_attention` are custom operators, so that torch.compile takes them as they are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
"""Tokens of the vocabulary that one program of `_draw` looks at."""


@triton.jit
def _attention(
    q, k, v, keys, values, places, out, sums, scale, q_row, q_head, k_row, k_head, v_row, v_head, c_row, c_place, c_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a row, a key/value head with its GROUP query heads, and one of SPLITS stretches of the row's places."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(places + row)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, length)
    g, d = tl.arange(0, PADDED), tl.arange(0, D)
    inside = g[:, None] < GROUP
    query = tl.load(q + row * q_row + (head * GROUP + g[:, None]) * q_head + d[None, :], mask=inside, other=0.0)
    own_key = tl.load(k + row * k_row + head * k_head + d)
    own_value = tl.load(v + row * v_row + head * v_head + d)
    here = row * c_row + head * c_head
    # The token itself belongs to the first stretch, which also writes it; nobody reads that place of the cache meanwhile.
    first = split == 0
    tl.store(keys + here + length * c_place + d, own_key, mask=(d < D) & first)
    tl.store(values + here + length * c_place + d, own_value, mask=(d < D) & first)
    own = tl.sum(query.to(tl.float32) * own_key.to(tl.float32)[None, :], axis=1) * scale
    top = tl.where(first, own, float("-inf"))
    total = tl.where(first, 1.0, 0.0) + tl.zeros([PADDED], tl.float32)
    result = tl.where(first, own_value.to(tl.float32), 0.0)[None, :] + tl.zeros([PADDED, D], tl.float32)
    for at in range(start, end, BLOCK):
        n = at + tl.arange(0, BLOCK)
        seen = n < end
        tile = here + n[:, None].to(tl.int64) * c_place + d[None, :]
        key = tl.load(keys + tile, mask=seen[:, None], other=0.0)
        value = tl.load(values + tile, mask=seen[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(top - higher)
        total = total * faded + tl.sum(weights, axis=1)
        result = result * faded[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher
    at_head = row * HEADS + head * GROUP + g
    if SPLITS == 1:
        result = result / total[:, None]
        tl.store(out + at_head[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        place = at_head * SPLITS + split
        tl.store(out + place[:, None] * D + d[None, :], result, mask=inside)
        tl.store(sums + place * 2, top, mask=g < GROUP)
        tl.store(sums + place * 2 + 1, total, mask=g < GROUP)


@triton.jit
def _combine(parts, sums, out, D: tl.constexpr, SPLITS: tl.constexpr):
    """One program for a row and a query head: the stretches' results, each by its share of the weights."""
    place = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    top = tl.load(sums + (place * SPLITS + s) * 2)
    total = tl.load(sums + (place * SPLITS + s) * 2 + 1)
    share = tl.exp(top - tl.max(top, axis=0))
    part = tl.load(parts + (place * SPLITS + s[:, None]) * D + d[None, :])
    result = tl.sum(part * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(out + place * D + d, result.to(out.dtype.element_ty))


def splits_for(programs: int) -> int:
    """Into how many stretches, a power of two, a row's places are cut so that the GPU has work for all its processors."""
    splits = 1
    while splits < 16 and programs * splits * 2 <= 384:
        splits *= 2
    return splits


def attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float) -> Tensor:
    """Write one token a row into the cache and let it attend to the row.

    Args:
        q: [B, heads, D]; D a power of two, and densely stored as for all here.
        k, v: [B, kv_heads, D].
        keys, values: [slots, capacity, kv_heads, D]; row r is slot r.
        places: [B] long, where the token goes; it attends to that place and all before.

    Returns:
        [B, heads, D] in the type of q.
    """
    rows, heads, width = q.shape
    groups = heads // k.shape[1]
    splits = splits_for(rows * k.shape[1])
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=q.device)
        sums = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=q.device)
    _attention[(rows, k.shape[1], splits)](
        q, k, v, keys, values, places, parts, sums, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), *keys.stride()[:3],
        HEADS=heads, GROUP=groups, PADDED=max(16, triton.next_power_of_2(groups)), D=width, SPLITS=splits,
        BLOCK=64, num_warps=4, num_stages=3,  # the best of seven tried on an H200
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * heads,)](parts, sums, out, D=width, SPLITS=splits, num_warps=1)
    return out


@torch.library.custom_op("ppoflow::decode_attention", mutates_args=("keys", "values"))
def decode_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float) -> Tensor:
    """`attention` as an operator."""
    return attention(q, k, v, keys, values, places, scale)


@decode_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("ppoflow::prefill_attention", mutates_args=("keys", "values"))
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    places: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """Write packed prompts into the cache and let each token attend to its prompt up to itself, by torch's flash attention.

    Args:
        q: [T, heads, D] of 16 bits; k, v: [T, kv_heads, D].
        slots, places: [T], where each token goes.
        bounds: [prompts + 1] int32, where each prompt begins, and the end.
        longest: tokens of the longest prompt, or more.
    """
    keys[slots, places], values[slots, places] = k, v
    made = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return made[0]


@prefill_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@triton.jit
def _mix(x):
    """As `sampling._mix`, whose constants these are."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _absorbed(keys, place, position):
    key = tl.load(keys + place).to(tl.uint32)
    return _mix((key ^ position) + tl.full([], 0x9E3779B9, tl.uint32))


@triton.jit
def _draw(
    logits, keys, positions, temperature, best, chosen, score, top, total, finite, vocab, logits_row,
    GREEDY: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a row and a chunk of the vocabulary: what `sampling.draw` needs of it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    raw = tl.load(logits + row * logits_row + token, mask=inside, other=0.0).to(tl.float32)
    scores = raw
    if not UNIT:
        scores = raw / tl.load(temperature)
    scores = tl.where(inside, scores, float("-inf"))
    perturbed = scores
    if not GREEDY:
        position = tl.load(positions + row).to(tl.uint32)
        bits = _mix(_mix(token.to(tl.uint32) + _absorbed(keys, row * 2, position)) ^ _absorbed(keys, row * 2 + 1, position))
        u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
        # -log(1 - u), by its series where 1 - u would be rounded.
        small = u * (1 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * 0.2))))
        perturbed = scores - tl.log(tl.where(u < 0.03, small, -tl.log(1 - u)))
    place = row * tl.num_programs(1) + chunk
    most, at = tl.max(perturbed, axis=0, return_indices=True)
    highest = tl.max(scores, axis=0)
    tl.store(best + place, most)
    tl.store(chosen + place, (chunk * BLOCK + at).to(tl.int64))
    tl.store(score + place, tl.sum(tl.where(tl.arange(0, BLOCK) == at, scores, 0.0), axis=0))
    tl.store(top + place, highest)
    tl.store(total + place, tl.sum(tl.exp(scores - highest), axis=0))
    wrong = (raw != raw) | (tl.abs(raw) == float("inf"))
    tl.store(finite + place, 1 - tl.max(wrong.to(tl.int32), axis=0))


def draw_chunks(
    logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor, greedy: bool, unit: bool = False
) -> tuple[Tensor, ...]:
    """The first half of a draw, for `draw_of`: one pass over the logits.

    Args:
        logits: [B, V], each row densely stored.
        keys, position: as for `sampling.draw`.
        temperature: [] float32.
        greedy: take the likeliest token.
        unit: the temperature is 1.

    Returns:
        [B, C] each, of C chunks of the vocabulary.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    chunks = triton.cdiv(vocab, _CHUNK)
    best, score, top, total = (torch.empty(rows, chunks, dtype=torch.float32, device=logits.device) for _ in range(4))
    chosen = torch.empty(rows, chunks, dtype=torch.long, device=logits.device)
    finite = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _draw[(rows, chunks)](
        logits, keys, position, temperature, best, chosen, score, top, total, finite, vocab, logits.stride(0),
        GREEDY=greedy, UNIT=unit or greedy, BLOCK=_CHUNK, num_warps=8,
    )  # fmt: skip
    return best, chosen, score, top, total, finite


def draw_of(
    best: Tensor, chosen: Tensor, score: Tensor, top: Tensor, total: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The second half: tokens [B] long, their log-probabilities [B] float32, and whether all logits are finite [B] bool."""
    chunk = best.argmax(dim=1, keepdim=True)
    highest = top.amax(dim=1, keepdim=True)
    normaliser = highest[:, 0] + (total * (top - highest).exp()).sum(dim=1).log()
    return chosen.gather(1, chunk)[:, 0], score.gather(1, chunk)[:, 0] - normaliser, finite.amin(dim=1) > 0
