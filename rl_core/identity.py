"""What decides a training step by step; its digest names the run.

A run goes on under it whatever else changes: code, library versions, number of ranks, micro-batches, saving, length.
"""

from typing import Any

from rl_core.config import Config
from rl_core.rewards import reward_fingerprint
from rl_core.user_code import code_fingerprint


def training_identity(config: Config, dataset: str, base: str) -> dict[str, Any]:
    """Inputs by the digests of their artifacts, reward and own algorithms by their content, the rest by its settings."""
    own = (config.algorithm.adv_estimator, config.algorithm.policy_loss)
    return {
        "config": config.training_identity(),
        "algorithm": [code_fingerprint(function.path, "algorithm") for function in own if not isinstance(function, str)],
        "reward": reward_fingerprint(config.reward),
        "dataset": dataset,
        "base": base,
    }
