"""Sums and whitening over the tokens that count.

Everything here selects with `torch.where`, never by multiplying: what stands at a masked place may be infinite or NaN
(padding of another model's output), and 0 * inf is NaN.
"""

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, R] where `mask` [B, R] is true, else 0; no gradient flows to the other places."""
    return torch.where(mask, values, values.new_zeros(()))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the places where `mask` is true: a scalar."""
    return masked(values, mask).sum()


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and standard deviation 1 over the masked-in tokens.

    As verl's `masked_whiten`: (x - mean) / sqrt(variance + 1e-8) with the unbiased variance (divided by n - 1). With fewer
    than two tokens in all there is no variance, and the values come back as they are.

    Args:
        values: [B, R] float.
        mask: [B, R] bool.

    Returns:
        [B, R] of the dtype of `values`, 0 where the mask is false.
    """
    exact = masked(values.double(), mask)
    count = mask.sum()
    if count < 2:
        return masked(values, mask)
    mean = exact.sum() / count
    # A second pass over centred values: sum(x²) - n·mean² loses its digits where the mean is large.
    variance = masked((exact - mean).square(), mask).sum() / (count - 1)
    return masked((exact - mean) * torch.rsqrt(variance + 1e-8), mask).to(values.dtype)
