"""`algorithm`: advantages, losses and the KL penalty. Defaults follow verl and TRL where they agree."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from rl_core.config.base import Section

Unit = Annotated[float, Field(ge=0, le=1)]


class AlgorithmConfig(Section):
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347) and a KL penalty to the reference policy."""

    gamma: Unit = 1.0
    """Discount per token."""

    lam: Unit = 1.0
    """λ of generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""

    whiten_advantages: bool = True
    """Give the advantages of a step mean 0 and standard deviation 1 over all response tokens of all ranks."""

    ppo_epochs: PositiveInt = 1
    """Passes over the rollouts of one step."""

    clip_ratio_low: PositiveFloat = 0.2
    """The ratio of new to old probability is clipped below at 1 - this."""

    clip_ratio_high: PositiveFloat = 0.2
    """The ratio of new to old probability is clipped above at 1 + this."""

    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip (Ye et al. 2020, arXiv:1912.09729): for a negative advantage the loss is at most this times -advantage."""

    cliprange_value: PositiveFloat = 0.5
    """A new value counts as moved by at most this from the old one."""

    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the actor's loss."""

    kl_in: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the reference policy is charged: per token in the reward, in the actor's loss, or nowhere (then no
    reference model is built)."""

    kl_coef: NonNegativeFloat = 0.001
    """Weight of the KL."""

    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL (Schulman 2020, "Approximating KL divergence"); null: k1 in the reward, k3 in the loss."""
