"""Advantages: how much better each token was than what was to be expected.

`estimate` finds the function by `algorithm.adv_estimator`. Whitening is left to the caller. Estimators that compare whole
responses score a response by the sum of its token rewards (so a KL charged in the reward counts, as in verl), and give the
same advantage to all of its tokens. Their statistics are of float64, over the responses that have tokens: where no token was
drawn there is nothing to make more or less likely, and no token that could carry the score.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.gae import gae, to_go
from rl_core.algorithms.masked import masked
from rl_core.algorithms.own import checked, own_function, wrong
from rl_core.config.algorithm import AlgorithmConfig, UserEstimator

EPSILON = 1e-6
"""Added to grpo's standard deviation, as in verl (TRL adds 1e-4)."""


@dataclass(frozen=True, kw_only=True)
class Signals:
    """What advantages are made of: B responses of at most R tokens, all of the step's, on every rank."""

    rewards: Tensor
    """[B, R] float, of `token_rewards`."""
    mask: Tensor
    """[B, R] bool: the tokens that count."""
    group: Tensor
    """[B] long: number of the prompt; any numbers, in any order."""
    values: Tensor | None = None
    """[B, R] of the critic before each token is chosen, where there is one."""
    baseline: Tensor | None = None
    """[B]: the score of the greedy response to the same prompt, for remax."""


Estimate = tuple[Tensor, Tensor]
Estimator = Callable[[Signals, AlgorithmConfig], Estimate]


@torch.no_grad()
def estimate(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """Advantages and returns by `algorithm.adv_estimator`, not whitened.

    Returns:
        advantages [B, R], and returns [B, R] (what a critic learns, where there is one), both 0 where the mask is false.

    Raises:
        ConfigError: the user's own function is missing or returns something else.
    """
    own = algorithm.adv_estimator
    if not isinstance(own, UserEstimator):
        return ESTIMATORS[own](signals, algorithm)
    result = own_function(own)(signals, algorithm)
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong(own, "it must be the two tensors (advantages, returns)")
    return checked(own, "advantages", result[0], signals.mask), checked(own, "returns", result[1], signals.mask)


def generalised(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """`gae`: by the critic's values."""
    assert signals.values is not None, "gae has a critic"
    return gae(signals.rewards, signals.values, signals.mask, algorithm.gamma, algorithm.lam)


def grpo(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """Group-relative: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2, by the unbiased standard deviation, as verl and TRL.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    over the responses to one prompt; with `norm_adv_by_std_in_grpo` false without the division (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783, section 3.2). Equal scores give 0. A lone response has no deviation and nothing to be compared with: it is
    left its score, as in verl.
    """
    scores, group = _Groups.of(signals)
    centred = scores - group.baseline(scores)
    if algorithm.norm_adv_by_std_in_grpo:
        variance = group.sum(centred.square()) / (group.count - 1).clamp(min=1)
        centred = centred / (torch.where(group.alone, 1.0, variance.sqrt()) + EPSILON)
    return _spread(centred, signals)


def rloo(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """REINFORCE leave one out: Ahmadian et al. 2024 (arXiv:2402.14740).

        A_i = r_i - Σ_{j ≠ i} r_j / (n - 1)

    over the n responses to one prompt. A lone response is left its score (as in verl).
    """
    scores, group = _Groups.of(signals)
    others = (group.sum(scores) - scores) / (group.count - 1).clamp(min=1)
    return _spread(scores - others, signals)


def opo(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """Optimal baseline: Hao et al. 2025 (arXiv:2505.23585): with l_i the length of response i in tokens,

        A_i = r_i - Σ_j l_j r_j / Σ_j l_j

    over the responses to one prompt. A lone response is left its score (as in verl).
    """
    scores, group = _Groups.of(signals)
    return _spread(scores - group.baseline(scores, weights=signals.mask.sum(dim=1).double()), signals)


def reinforce_plus_plus(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """REINFORCE++: Hu 2025 (arXiv:2501.03262): what follows a token, discounted by `gamma`, without a baseline.

        A_t = Σ_{k ≥ t} gamma^(k - t) r_k

    The whitening over the step, which is its baseline, is the caller's. Gaps in the mask are stepped over, as in `gae`.
    """
    returns = to_go(signals.rewards, signals.mask, algorithm.gamma)
    return returns, returns


def reinforce_plus_plus_baseline(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """REINFORCE++ with a baseline (the same paper): r_i - mean(r) over the responses to one prompt; the caller whitens over the
    step instead of dividing by a deviation in each group. A lone response is left its score (as in verl)."""
    scores, group = _Groups.of(signals)
    return _spread(scores - group.baseline(scores), signals)


def remax(signals: Signals, algorithm: AlgorithmConfig) -> Estimate:
    """ReMax: Li et al. 2023 (arXiv:2310.10505), algorithm 1: what follows a token, less the greedy response's score.

    Args:
        signals: with `baseline`.
    """
    assert signals.baseline is not None, "remax has greedy responses"
    returns = to_go(signals.rewards, signals.mask, 1.0)
    return masked(returns - signals.baseline[:, None].to(returns.dtype), signals.mask), returns


ESTIMATORS: dict[str, Estimator] = {
    "gae": generalised,
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


class _Groups:
    """Sums over the responses to the same prompt; empty responses take no part."""

    def __init__(self, group: Tensor, counts: Tensor) -> None:
        names, self._place = torch.unique(group, return_inverse=True)
        self._counts, self._size = counts, len(names)
        self.count = self.sum(torch.ones_like(group, dtype=torch.float64))
        """[B] float64: responses with tokens in the group."""
        self.alone = self.count < 2
        """[B] bool: there is no other to be compared with."""

    @classmethod
    def of(cls, signals: Signals) -> "tuple[Tensor, _Groups]":
        """The score [B] float64 of each response, and its group."""
        scores = masked(signals.rewards, signals.mask).double().sum(dim=1)
        return scores, cls(signals.group, signals.mask.any(dim=1))

    def sum(self, values: Tensor) -> Tensor:
        """[B]: the sum of `values` [B] float64 over the group."""
        totals = values.new_zeros(self._size)
        totals.index_add_(0, self._place, torch.where(self._counts, values, 0.0))
        return totals[self._place]

    def baseline(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """[B]: the mean of `scores` [B] over the group, weighted by `weights` [B]; 0 where there is but one."""
        weights = torch.ones_like(scores) if weights is None else weights
        mean = self.sum(weights * scores) / self.sum(weights).clamp(min=1)
        return torch.where(self.alone, 0.0, mean)


def _spread(advantages: Tensor, signals: Signals) -> Estimate:
    """The same advantage [B] for all tokens of a response: [B, R], twice, since no critic learns from them."""
    tokens = masked(advantages[:, None].expand(signals.mask.shape).to(signals.rewards.dtype), signals.mask)
    return tokens, tokens
