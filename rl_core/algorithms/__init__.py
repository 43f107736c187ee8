"""The mathematics of the training: pure functions on tensors [rows, response width] with a bool mask, nothing else."""

from rl_core.algorithms.advantages import Signals, estimate
from rl_core.algorithms.aggregation import row_weights
from rl_core.algorithms.controllers import next_kl_coef
from rl_core.algorithms.corrections import rollout_weights
from rl_core.algorithms.covariance import chosen_tokens, needs_whole_mini_batch
from rl_core.algorithms.gae import gae, token_rewards
from rl_core.algorithms.kl import kl
from rl_core.algorithms.losses import entropy_loss, value_loss
from rl_core.algorithms.masked import masked, masked_sum, whiten
from rl_core.algorithms.policy_losses import Update, policy_loss

__all__ = [
    "Signals",
    "Update",
    "chosen_tokens",
    "entropy_loss",
    "estimate",
    "gae",
    "kl",
    "masked",
    "masked_sum",
    "needs_whole_mini_batch",
    "next_kl_coef",
    "policy_loss",
    "rollout_weights",
    "row_weights",
    "token_rewards",
    "value_loss",
    "whiten",
]
