"""Which tokens clip_cov and kl_cov treat apart: those whose log-probability goes with their advantage, by which entropy falls.

Cui et al. 2025 (arXiv:2505.22617), section 4.2. The covariance of token t is, over all tokens of the mini-batch,

    cov_t = (logprob_t - mean(logprob)) · (A_t - mean(A))

and so are the shares. verl takes both over each micro-batch, so that its choice depends on how the mini-batch is cut; in one
micro-batch the two agree.
"""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked, masked_sum
from rl_core.algorithms.policy_losses import clip_decides
from rl_core.config.algorithm import AlgorithmConfig


def needs_whole_mini_batch(algorithm: AlgorithmConfig) -> bool:
    """Whether the policy loss wants `chosen_tokens`, and so the log-probabilities of the whole mini-batch beforehand."""
    return algorithm.policy_loss in ("clip_cov", "kl_cov")


@torch.no_grad()
def chosen_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, draws: Tensor, algorithm: AlgorithmConfig
) -> Tensor:
    """The tokens of a mini-batch that its loss treats apart.

    clip_cov: `clip_cov_ratio` of the tokens, at random among those with a covariance between `clip_cov_lb` and `clip_cov_ub`
    that PPO's clip leaves alone. kl_cov: the `kl_cov_ratio` of the tokens with the greatest covariance. Of a share that is not 0
    at least one token.

    Args:
        logprobs, old_logprobs, advantages: [B, R] of the whole mini-batch, as in `Update`.
        mask: [B, R] bool.
        draws: [B, R] uniform random numbers; the lowest win (clip_cov).

    Returns:
        [B, R] bool.
    """
    count = int(mask.sum())
    covariance = _centred(logprobs, mask) * _centred(advantages, mask)
    if algorithm.policy_loss == "clip_cov":
        share, rank = algorithm.clip_cov_ratio, draws
        clipped = clip_decides(logprobs, old_logprobs, advantages, mask, algorithm)
        within = (covariance > algorithm.clip_cov_lb) & (covariance < algorithm.clip_cov_ub)
        candidates = mask & within & ~clipped
    else:
        share, rank, candidates = algorithm.kl_cov_ratio, -covariance, mask
    wanted = max(int(share * count), 1) if share > 0 else 0
    places = candidates.flatten().nonzero()[:, 0]
    # Stable, so that equal ranks are taken in the order of samples and tokens, whatever the padding between them.
    first = rank.flatten()[places].argsort(stable=True)[:wanted]
    chosen = torch.zeros_like(mask.flatten())
    chosen[places[first]] = True
    return chosen.reshape(mask.shape)


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    """[B, R] float64, less the mean over the mask."""
    exact = masked(values, mask).double()
    return masked(exact - masked_sum(exact, mask) / mask.sum().clamp(min=1), mask)
