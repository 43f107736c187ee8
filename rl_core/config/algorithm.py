"""`algorithm`: advantages, losses and the KL penalty. Defaults follow verl and TRL where they agree."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rl_core.config.base import Runtime, Section

Unit = Annotated[float, Field(ge=0, le=1)]


class Needs(NamedTuple):
    """What an advantage estimator needs of a run."""

    critic: bool = False
    """A critic's values."""
    group: bool = False
    """More than one response to each prompt."""
    greedy: bool = False
    """The score of the greedy response to each prompt."""
    whitened: bool = False
    """Its advantages are whitened unless `whiten_advantages` says otherwise."""


ESTIMATORS = {
    "gae": Needs(critic=True, whitened=True),
    "grpo": Needs(group=True),
    "rloo": Needs(group=True),
    "reinforce_plus_plus": Needs(whitened=True),
    "reinforce_plus_plus_baseline": Needs(group=True, whitened=True),
    "remax": Needs(greedy=True),
    "opo": Needs(group=True),
}
"""The built-in advantage estimators; `rl_core.algorithms.advantages` says what each computes, and cites it."""


class UserEstimator(Section):
    """Your own advantage estimator: a function `(signals, algorithm) -> (advantages, returns)`, as those in
    `rl_core/algorithms/advantages.py`."""

    path: Runtime[str]
    """The Python file. Its content, not its path, enters the keys."""
    name: str
    """The function in it."""
    critic: bool = False
    """It needs a critic's values."""
    greedy: bool = False
    """It needs the score of the greedy response to each prompt."""


class UserPolicyLoss(Section):
    """Your own policy loss: a function `(update, algorithm) -> (loss, sums)`, as those in
    `rl_core/algorithms/policy_losses.py`."""

    path: Runtime[str]
    """The Python file. Its content, not its path, enters the keys."""
    name: str
    """The function in it."""


class AlgorithmConfig(Section):
    """PPO (Schulman et al. 2017, arXiv:1707.06347) with a KL penalty to the reference policy; critic-free estimators and other
    policy losses share its loop."""

    adv_estimator: (
        Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo"] | UserEstimator
    ) = "gae"
    """How advantages come from rewards. Only `gae` has a critic. `grpo`, `rloo`, `reinforce_plus_plus_baseline` and `opo` compare
    the responses to one prompt (`rollout.n` > 1), `remax` compares with the greedy response."""

    gamma: Unit = 1.0
    """Discount per token (gae, reinforce_plus_plus)."""

    lam: Unit = 1.0
    """λ of generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438)."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide grpo's advantages by the standard deviation of the prompt's scores (Shao et al. 2024, arXiv:2402.03300); false: as
    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    whiten_advantages: bool | None = None
    """Give the advantages of a step mean 0 and standard deviation 1 over all response tokens of all ranks. null: as the
    estimator's authors do (gae and both reinforce_plus_plus)."""

    critic_warmup: NonNegativeInt = 0
    """For so many first steps only the critic is updated."""

    ppo_epochs: PositiveInt = 1
    """Passes over the rollouts of one step."""

    policy_loss: Literal["ppo", "gspo", "cispo", "gpg", "clip_cov", "kl_cov"] | UserPolicyLoss = "ppo"
    """The actor's loss per token: the clipped surrogate, or one of those that `rl_core/algorithms/policy_losses.py` cites."""

    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How the losses of tokens become one number: the mean over all tokens of the mini-batch; or first the sum or mean in each
    response, or the sum divided by `loss_scale_factor`, and then the mean over responses. null: token-mean, for gspo
    seq-mean-token-mean."""

    loss_scale_factor: PositiveFloat | None = None
    """What seq-mean-token-sum-norm divides by. null: `rollout.max_new_tokens`."""

    clip_ratio_low: PositiveFloat = 0.2
    """The ratio of new to old probability is clipped below at 1 - this. gspo, whose ratio is that of whole responses, wants about
    3e-4; cispo's authors leave this side open (1)."""

    clip_ratio_high: PositiveFloat = 0.2
    """The ratio of new to old probability is clipped above at 1 + this (gspo: about 4e-4)."""

    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip (Ye et al. 2020, arXiv:1912.09729): for a negative advantage the loss is at most this times -advantage."""

    clip_cov_ratio: Unit = 0.0002
    """clip_cov: share of the mini-batch's tokens whose gradient is cut."""

    clip_cov_lb: float = 1.0
    """clip_cov: least covariance of log-probability and advantage of a token that may be cut."""

    clip_cov_ub: float = 5.0
    """clip_cov: greatest covariance of a token that may be cut."""

    kl_cov_ratio: Unit = 0.0002
    """kl_cov: share of the mini-batch's tokens, those of greatest covariance, that are charged a KL to the old policy."""

    kl_cov_coef: NonNegativeFloat = 1.0
    """kl_cov: weight of that KL."""

    cliprange_value: PositiveFloat = 0.5
    """A new value counts as moved by at most this from the old one."""

    entropy_coeff: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the actor's loss."""

    kl_in: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the reference policy is charged: per token in the reward, in the actor's loss, or nowhere (then no
    reference model is built)."""

    kl_coef: NonNegativeFloat = 0.001
    """Weight of the KL; where it is adaptive, the weight at the start."""

    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None = None
    """Estimator of the KL (Schulman 2020, "Approximating KL divergence"); null: k1 in the reward, k3 in the loss."""

    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the weight after each step so that the KL comes to `kl_target` (Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2)."""

    kl_target: PositiveFloat = 0.1
    """The KL per token, in nats, that the adaptive controller aims at."""

    kl_horizon: PositiveInt = 10000
    """Responses over which the adaptive controller corrects; a step counts at most as so many."""

    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Weigh the policy loss by the probability that training gives to what the rollout drew, over that of the rollout itself
    (they differ by rounding and kernels): per token, or per response as a whole. Truncated importance sampling, Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"."""

    rollout_is_threshold: PositiveFloat = 2.0
    """The weight is at most this."""

    @property
    def needs(self) -> Needs:
        """What the estimator needs of the run."""
        own = self.adv_estimator
        return Needs(critic=own.critic, greedy=own.greedy) if isinstance(own, UserEstimator) else ESTIMATORS[own]

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.needs.whitened if self.whiten_advantages is None else self.whiten_advantages

    @property
    def aggregation(self) -> str:
        """The `loss_agg_mode` in force."""
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.policy_loss == "gspo" else "token-mean")
