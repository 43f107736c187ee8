"""The cited equations written down once more, each response a list of its tokens' numbers, in float64 and without torch.

They share nothing with `rl_core.algorithms`. Losses come with their derivative by the token's log-probability.
"""

import math
import statistics
from collections.abc import Callable

Row = list[float]
Lost = tuple[float, float]
"""A token's loss and its derivative."""


def gae(rewards: Row, values: Row, gamma: float, lam: float) -> Row:
    """arXiv:1506.02438 eq. 16 as it is written: Σ_l (γλ)^l δ_{t+l}."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


def following(rewards: Row, gamma: float) -> Row:
    """Σ_{k ≥ t} γ^(k - t) r_k."""
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def grpo(scores: Row, lengths: list[int]) -> Row:
    """arXiv:2402.03300 section 4.1.2, with verl's 1e-6."""
    if len(scores) == 1:
        return [scores[0] / (1 + 1e-6)]
    return [(score - statistics.fmean(scores)) / (statistics.stdev(scores) + 1e-6) for score in scores]


def centred(scores: Row, lengths: list[int]) -> Row:
    """arXiv:2503.20783 and the baseline of arXiv:2501.03262."""
    return scores if len(scores) == 1 else [score - statistics.fmean(scores) for score in scores]


def rloo(scores: Row, lengths: list[int]) -> Row:
    """arXiv:2402.14740: less the mean of the others."""
    return [score - statistics.fmean(scores[:i] + scores[i + 1 :] or [0.0]) for i, score in enumerate(scores)]


def opo(scores: Row, lengths: list[int]) -> Row:
    """arXiv:2505.23585: less the mean weighted by length."""
    if len(scores) == 1:
        return scores
    baseline = sum(length * score for length, score in zip(lengths, scores, strict=True)) / sum(lengths)
    return [score - baseline for score in scores]


def surrogate(ratio: float, advantage: float, low: float, high: float) -> Lost:
    """arXiv:1707.06347 eq. 7 with a range of its own on each side."""
    least, most = 1 - low, 1 + high
    clipped = least if ratio < least else most if ratio > most else ratio
    if -advantage * clipped > -advantage * ratio:
        return -advantage * clipped, 0.0
    return -advantage * ratio, -advantage * ratio


def ppo(new: Row, old: Row, advantages: Row, low: float, high: float, c: float) -> list[Lost]:
    """With the dual clip of arXiv:1912.09729: at least c·A for a negative A (as a gain)."""
    lost = []
    for x, y, advantage in zip(new, old, advantages, strict=True):
        loss, slope = surrogate(math.exp(x - y), advantage, low, high)
        lost.append((-advantage * c, 0.0) if advantage < 0 and loss > -advantage * c else (loss, slope))
    return lost


def gspo(new: Row, old: Row, advantages: Row, low: float, high: float, c: float) -> list[Lost]:
    """arXiv:2507.18071: the ratio is the geometric mean over the response."""
    ratio = math.prod(math.exp(x - y) for x, y in zip(new, old, strict=True)) ** (1 / len(new))
    return [surrogate(ratio, advantage, low, high) for advantage in advantages]


def cispo(new: Row, old: Row, advantages: Row, low: float, high: float, c: float) -> list[Lost]:
    """arXiv:2506.13585: the ratio, clipped, is a constant factor of REINFORCE."""
    weights = [min(max(math.exp(x - y), 1 - low), 1 + high) for x, y in zip(new, old, strict=True)]
    return [(-w * a * x, -w * a) for w, a, x in zip(weights, advantages, new, strict=True)]


def gpg(new: Row, old: Row, advantages: Row, low: float, high: float, c: float) -> list[Lost]:
    """arXiv:2504.02546: REINFORCE."""
    return [(-a * x, -a) for a, x in zip(advantages, new, strict=True)]


POLICY_LOSSES: dict[str, Callable[..., list[Lost]]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "gpg": gpg}


def covariances(new: Row, advantages: Row) -> Row:
    """arXiv:2505.22617: of tokens from all responses."""
    return [(x - statistics.fmean(new)) * (a - statistics.fmean(advantages)) for x, a in zip(new, advantages, strict=True)]


def value_loss(value: float, old: float, target: float, cliprange: float) -> float:
    """baselines' ppo2."""
    moved = min(max(value, old - cliprange), old + cliprange)
    return 0.5 * max((value - target) ** 2, (moved - target) ** 2)


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(-d) - 1 + d, 10.0),
    "abs": abs,
}
"""Of d = log π - log π_ref: joschu.net/blog/kl-approx.html."""


def aggregate(losses: list[Row], mode: str, scale: float) -> float:
    """One number from the losses of the tokens of each response (empty ones among them)."""
    some = [row for row in losses if row]
    return {
        "token-mean": lambda: statistics.fmean(loss for row in some for loss in row),
        "seq-mean-token-sum": lambda: statistics.fmean(sum(row) for row in some),
        "seq-mean-token-mean": lambda: statistics.fmean(statistics.fmean(row) for row in some),
        "seq-mean-token-sum-norm": lambda: statistics.fmean(sum(row) / scale for row in some),
    }[mode]()
