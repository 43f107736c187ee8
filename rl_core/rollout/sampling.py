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
_GOLDEN = 0x9E3779B9
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
    keys = []
    for salt in _SALTS:  # two words: with 32 bits only, some of a step's 10⁶ draws would share their noise
        key = torch.full_like(sample_index, salt)
        for word in (seed & _MASK, (seed >> 32) & _MASK, step & _MASK, sample_index & _MASK, position & _MASK):
            key = _mix(((key ^ word) + _GOLDEN) & _MASK)
        keys.append(key[:, None])
    tokens = torch.arange(vocab, device=sample_index.device)
    bits = _mix(_mix((tokens + keys[0]) & _MASK) ^ keys[1])
    # Fine near 0, where the Gumbel noise has its long tail; near 1 float32 would round to 1 itself.
    return bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def sample(
    logits: Tensor, temperature: float, *, seed: int, step: int, sample_index: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature).

    Args:
        logits: [B, V] of any floating type.
        temperature: 0 takes the likeliest token; its log-probability is then that at temperature 1.
        seed, step, sample_index, position: what decides the draw, see `uniform`.

    Returns:
        tokens [B] long and their log-probabilities [B] float32.

    Raises:
        NonFiniteError: a logit is infinite or NaN.
    """
    finite = logits.isfinite().all(dim=1)
    if not finite.all():
        row = int(finite.logical_not().nonzero()[0])
        raise NonFiniteError(
            f"The policy gave infinite or NaN logits in the rollout of step {step}, for sample {int(sample_index[row])} at "
            f"response token {int(position[row])} ({int(finite.logical_not().sum())} of {len(logits)} rows of its batch). The "
            "weights have diverged or a 16-bit type overflows: go on from an earlier checkpoint with a lower "
            "trainer.learning_rate or with model.torch_dtype float32."
        )
    scores = logits.float()
    if temperature > 0:
        scores = scores / temperature
        noise = uniform(seed, step, sample_index, position, logits.shape[1])
        # log1p keeps the small numbers that make the large noise: g = -log(-log(1 - u)).
        tokens = (scores - noise.neg_().log1p_().neg_().log_()).argmax(dim=1)
    else:
        tokens = scores.argmax(dim=1)
    return tokens, scores.log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
