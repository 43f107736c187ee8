"""Sums and whitening over the tokens that count.

Everything here selects with `torch.where`, never by multiplying: what stands at a masked place may be infinite or NaN
(padding of another model's output), and 0 * inf is NaN.
"""

from collections.abc import Callable

import torch
from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]
"""Takes a float64 tensor and returns its sum over all ranks (the same on each)."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, R] where `mask` [B, R] is true, else 0; no gradient flows to the other places."""
    return torch.where(mask, values, values.new_zeros(()))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the places where `mask` is true: a scalar."""
    return masked(values, mask).sum()


def whiten(values: Tensor, mask: Tensor, all_reduce: AllReduce | None = None) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the masked-in tokens of all ranks.

    As verl's `masked_whiten`: (x - mean) / sqrt(variance + 1e-8) with the unbiased variance (divided by n - 1). With fewer
    than two tokens in all there is no variance, and the values come back as they are.

    Args:
        values: [B, R] float.
        mask: [B, R] bool.
        all_reduce: sums over ranks; None on a single rank. Called the same number of times on every rank, also by one
            that has no token.

    Returns:
        [B, R] of the dtype of `values`, 0 where the mask is false.
    """
    reduce = all_reduce or (lambda tensor: tensor)
    exact = masked(values.double(), mask)
    count, total = reduce(torch.stack([mask.sum().double(), exact.sum()])).unbind()
    if count < 2:
        return masked(values, mask)
    mean = total / count
    # A second pass over centred values: sum(x²) - n·mean² loses its digits where the mean is large.
    variance = reduce(masked((exact - mean).square(), mask).sum()[None])[0] / (count - 1)
    return masked((exact - mean) * torch.rsqrt(variance + 1e-8), mask).to(values.dtype)
