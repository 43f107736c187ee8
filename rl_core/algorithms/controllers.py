"""The weight of the KL to the reference from step to step."""

import math

from rl_core.config.algorithm import AlgorithmConfig


def next_kl_coef(coef: float, kl: float, responses: int, algorithm: AlgorithmConfig) -> float:
    """The weight in the next step.

    `adaptive` is the proportional controller of Ziegler et al. 2019 (arXiv:1909.08593) section 2.2, with their code's K:

        coef · (1 + clip(kl / kl_target - 1, ±0.2) · responses / kl_horizon)

    where a step counts at most as `kl_horizon` responses: the weight changes by a fifth at most, and never its sign.

    Args:
        coef: the weight in this step.
        kl: mean KL per token of this step, in nats; one that is no finite number changes nothing.
        responses: of this step, on all ranks.
    """
    if algorithm.kl_controller == "fixed" or not math.isfinite(kl):
        return coef
    error = min(max(kl / algorithm.kl_target - 1, -0.2), 0.2)
    return coef * (1 + error * min(responses / algorithm.kl_horizon, 1.0))
