"""Per-token estimates of KL(policy ‖ reference) from log-probabilities of sampled tokens.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With d = logprob - ref_logprob of a token
drawn from the policy:

    k1 = d                    unbiased, high variance, negative for half of the tokens
    k2 = d² / 2               biased, low variance; its gradient is that of the KL
    k3 = exp(-d) - 1 + d      unbiased, low variance, never negative
    abs = |d|                 no estimate of the KL, but of a distance (verl has it)
"""

from typing import Literal

from torch import Tensor

from rl_core.algorithms.masked import masked

Estimator = Literal["k1", "k2", "k3", "abs"]


def kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator) -> Tensor:
    """KL estimate per token.

    Args:
        logprobs: [B, R] of the policy; gradients flow through it.
        ref_logprobs: [B, R] of the reference.
        mask: [B, R] bool.
        estimator: see the module. For k3 the exponent is clamped to ±20 and the result to 10 (as verl's `low_var_kl`), so
            that one token on which the two models disagree wildly cannot decide the step.

    Returns:
        [B, R], nats, 0 where the mask is false.
    """
    difference = masked(logprobs - ref_logprobs, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "abs":
        return difference.abs()
    clamped = difference.clamp(-20.0, 20.0)
    return ((-clamped).exp() - 1 + clamped).clamp(max=10.0)
