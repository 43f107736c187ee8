"""Random draws that depend on nothing but (seed, step, sample, position), and the choice of a token by them.

A generator with a state would give other draws as soon as rows are batched in another way or spread over other ranks. Here
the number that decides about token v is a hash of (seed, step, sample, position, v), in integer arithmetic that is exact on
every device. The choice is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030): argmax(logits + g) is
distributed as softmax(logits), without the floating-point cumsum that CUDA refuses in deterministic mode.
"""

import torch
from torch import Tensor

from rl_core.errors import NonFiniteError

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
_SALTS = (0x243F6A88, 0x85A308D3)
# Multipliers of the mixer "lowbias32" (C. Wellons, "Prospecting for hash functions"); the second as the signed number of the
# same 32 bits, so that a product with 32 bits stays inside int64.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the input moves every bit of the output; works in place."""
    x ^= x >> 16
    x *= _FIRST
    x &= _MASK
    x ^= x >> 15
    x *= _SECOND
    x &= _MASK
    x ^= x >> 16
    return x


def _absorbed(key: Tensor, word: Tensor | int) -> Tensor:
    return _mix(((key ^ (word & _MASK)) + GOLDEN) & _MASK)


def row_keys(seed: int, step: int, sample_index: Tensor) -> Tensor:
    """[B, 2] long: what decides a sample's draws, all positions alike; arguments as for `uniform`."""
    keys = []
    for salt in _SALTS:  # two words: with 32 bits only, some of a step's 10⁶ draws would share their noise
        key = torch.full_like(sample_index, salt)
        for word in (seed, seed >> 32, step, sample_index):
            key = _absorbed(key, word)
        keys.append(key)
    return torch.stack(keys, dim=1)


def noise(keys: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The numbers of `uniform` from `row_keys`."""
    first, second = _absorbed(keys, position[:, None]).split(1, dim=1)
    tokens = torch.arange(vocab, device=keys.device)
    bits = _mix(_mix((tokens + first) & _MASK) ^ second)
    # Fine near 0, where the Gumbel noise has its long tail; near 1 float32 would round to 1 itself.
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def uniform(seed: int, step: int, sample_index: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1), equal on every device and in every batch.

    Args:
        seed: any integer; its low 64 bits count.
        step: number of the training step.
        sample_index: [B] long, number of the sample in its step over all ranks.
        position: [B] long, number of the token in its response.
        vocab: V.

    Returns:
        [B, V] float32, on the device of `sample_index`.
    """
    return noise(row_keys(seed, step, sample_index), position, vocab)


def allowed(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """The tokens that may be drawn: the likeliest `top_k`, and of these the likeliest that together have the share `top_p`.

    A threshold on the probability is found by bisection of its bits: no sort, and no cumsum, which CUDA refuses in deterministic
    mode. Tokens as likely as the last one are allowed with it.

    Args:
        scores: [B, V] float32 logits, at the temperature.
        top_k: 0 allows all.
        top_p: 1 allows all. Nucleus sampling: Holtzman et al. 2019, arXiv:1904.09751.

    Returns:
        [B, V] bool, at least one in each row.
    """
    share = scores.softmax(dim=1)
    if top_k:
        share = share * _above(share, torch.ones_like(share), torch.full_like(share[:, :1], top_k))
    if top_p < 1:
        share = share * _above(share, share, share.sum(dim=1, keepdim=True) * top_p)
    return share > 0


def _above(share: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """[B, V] bool: share ≥ the greatest threshold [B, 1] above which the weights sum to `wanted` [B, 1] (or all of them)."""
    low = torch.zeros_like(wanted, dtype=torch.int32)
    high = share.max(dim=1, keepdim=True).values.view(torch.int32) + 1  # positive floats are ordered as their bits
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = (weight * (share >= middle.view(torch.float32))).sum(dim=1, keepdim=True) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return share >= low.view(torch.float32)


def draw(
    logits: Tensor, keys: Tensor, position: Tensor, temperature: Tensor | float | None, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature), or from the part of it that `allowed` leaves.

    Args:
        logits: [B, V] of any floating type.
        keys: [B, 2] long, see `row_keys`.
        position: [B] long.
        temperature: None takes the likeliest token; its log-probability is then that at temperature 1.

    Returns:
        tokens [B] long and their log-probabilities [B] float32 under softmax(logits / temperature), whatever is allowed.
    """
    scores = logits.float()
    if temperature is None:
        tokens = scores.argmax(dim=1)
    else:
        scores = scores / temperature
        # log1p keeps the small numbers that make the large noise: g = -log(-log(1 - u)).
        perturbed = scores - noise(keys, position, logits.shape[1]).neg_().log1p_().neg_().log_()
        if top_k or top_p < 1:
            perturbed = perturbed.masked_fill(~allowed(scores, top_k, top_p), -torch.inf)
        tokens = perturbed.argmax(dim=1)
    return tokens, scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=1)


def sample(
    logits: Tensor,
    temperature: float,
    *,
    seed: int,
    step: int,
    sample_index: Tensor,
    position: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature).

    Args:
        logits: [B, V] of any floating type.
        temperature: 0 takes the likeliest token; its log-probability is then that at temperature 1.
        seed, step, sample_index, position: what decides the draw, see `uniform`.
        top_k, top_p: see `allowed`.

    Returns:
        tokens [B] long and their log-probabilities [B] float32, see `draw`.

    Raises:
        NonFiniteError: a logit is infinite or NaN.
    """
    finite = logits.isfinite().all(dim=1)
    if not finite.all():
        raise non_finite(finite.logical_not(), sample_index, position, step)
    return draw(logits, row_keys(seed, step, sample_index), position, temperature or None, top_k, top_p)


def non_finite(bad: Tensor, sample_index: Tensor, position: Tensor, step: int) -> NonFiniteError:
    """What to raise of a batch some of whose rows have infinite or NaN logits; [B] each, `bad` bool."""
    row = int(bad.nonzero()[0])
    return NonFiniteError(
        f"The policy gave infinite or NaN logits in the rollout of step {step}, for sample {int(sample_index[row])} at "
        f"response token {int(position[row])} ({int(bad.sum())} of {len(bad)} rows of its batch). The "
        "weights have diverged or a 16-bit type overflows: go on from an earlier checkpoint with a lower "
        "trainer.learning_rate or with model.torch_dtype float32."
    )
