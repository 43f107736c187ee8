"""The mathematics of PPO: pure functions on tensors [rows, response width] with a bool mask, nothing else."""

from rl_core.algorithms.advantages import gae, token_rewards
from rl_core.algorithms.kl import kl
from rl_core.algorithms.losses import entropy_loss, policy_loss, value_loss
from rl_core.algorithms.masked import masked_sum, whiten

__all__ = ["entropy_loss", "gae", "kl", "masked_sum", "policy_loss", "token_rewards", "value_loss", "whiten"]
