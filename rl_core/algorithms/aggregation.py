"""How the losses of tokens become one number for a mini-batch.

The loss is Σ_rows weight_row · Σ_t loss[row, t], with weights that are known from the lengths of the whole mini-batch before any
of it is computed. So it does not depend on how the mini-batch is cut into micro-batches or spread over ranks.
"""

import torch
from torch import Tensor


def row_weights(mask: Tensor, mode: str, scale: float) -> Tensor:
    """What each response's summed token losses are multiplied by.

    With N responses that have tokens, and T_i tokens in response i:

        token-mean               1 / Σ_j T_j            DAPO (Yu et al. 2025, arXiv:2503.14476) section 3.3
        seq-mean-token-sum       1 / N
        seq-mean-token-mean      1 / (N · T_i)          GRPO (Shao et al. 2024, arXiv:2402.03300) eq. 3
        seq-mean-token-sum-norm  1 / (N · scale)        Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) section 3.2

    all as in verl, and the last as in TRL's dr_grpo.

    Args:
        mask: [B, R] bool of the whole mini-batch on all ranks.
        mode: `algorithm.aggregation`.
        scale: of seq-mean-token-sum-norm, in tokens.

    Returns:
        [B] float32; 0 for responses without tokens, which do not count in N either.
    """
    lengths = mask.sum(dim=1).double()
    some = lengths > 0
    number = some.sum()
    divisors = {
        "token-mean": lengths.sum(),
        "seq-mean-token-sum": number,
        "seq-mean-token-mean": number * lengths,
        "seq-mean-token-sum-norm": number * scale,
    }
    return torch.where(some, 1.0 / torch.where(some, divisors[mode], 1.0), 0.0).float()
