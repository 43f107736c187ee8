"""The actor's loss per token, unreduced: the clipped surrogate of PPO and what has been put in its place.

`policy_loss` finds the function by `algorithm.policy_loss`. The caller makes one number of it (`rl_core.algorithms.aggregation`)
and adds entropy and KL. Everywhere ρ = exp(logprob - old_logprob), A is the advantage, and the loss is what is minimised.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked, masked_sum
from rl_core.algorithms.own import checked, own_function, wrong
from rl_core.config.algorithm import AlgorithmConfig, UserPolicyLoss

Sums = dict[str, Tensor]
"""Sums over the mask, scalars without gradient; divided by the number of tokens they are the metrics of that name in verl."""

FARTHEST = 20.0
"""Bound of |log ρ|, as in verl: exp(±20) is beyond every clip, and exp(89) would be inf."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """B responses of at most R tokens, a micro-batch or any other part of a mini-batch."""

    logprobs: Tensor
    """[B, R] of the policy being trained; gradients flow through it."""
    old_logprobs: Tensor
    """[B, R] of the policy before the step's updates."""
    advantages: Tensor
    """[B, R]."""
    mask: Tensor
    """[B, R] bool: the tokens that count."""
    chosen: Tensor | None = None
    """[B, R] bool, of `chosen_tokens` over the whole mini-batch, for clip_cov and kl_cov; None: no token."""


PolicyLoss = Callable[[Update, AlgorithmConfig], tuple[Tensor, Sums]]


def policy_loss(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """The loss by `algorithm.policy_loss`.

    Returns:
        loss [B, R], 0 where the mask is false, and sums over the mask: `ppo_kl` (old_logprob - logprob, k1 to the old policy),
        and where the loss has such tokens `pg_clipfrac` (those that the clip decides on) and `pg_clipfrac_lower` (those that
        the dual clip decides on).

    Raises:
        ConfigError: the user's own function is missing or returns something else.
    """
    own = algorithm.policy_loss
    if not isinstance(own, UserPolicyLoss):
        return LOSSES[own](update, algorithm)
    result = own_function(own)(update, algorithm)
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong(own, "it must be (loss, sums), a tensor and a dict")
    loss, sums = result
    if not isinstance(sums, dict) or not all(isinstance(total, Tensor) and total.numel() == 1 for total in sums.values()):
        raise wrong(own, "sums must be a dict of tensors of one number each")
    loss = checked(own, "loss", loss, update.mask)
    if update.logprobs.requires_grad and not loss.requires_grad:
        raise wrong(own, "no gradient flows through the loss; it must be made of update.logprobs")
    return loss, {name: total.detach() for name, total in sums.items()}


def ppo(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """Clipped surrogate: Schulman et al. 2017 (arXiv:1707.06347) eq. 7, with the dual clip of Ye et al. 2020
    (arXiv:1912.09729).

        L = max(-A·ρ, -A·clip(ρ, 1 - low, 1 + high));   where A < 0 also L = min(L, -A·c)
    """
    log_ratio, advantages = _log_ratio(update), masked(update.advantages, update.mask)
    single, decides = _clipped(log_ratio.exp(), advantages, algorithm)
    bound, negative = -advantages * algorithm.clip_ratio_c, advantages < 0
    loss = torch.where(negative, torch.minimum(single, bound), single)
    return loss, {
        "pg_clipfrac": _number(decides, update),
        "pg_clipfrac_lower": _number(negative & (single > bound), update),
        "ppo_kl": _kl(update),
    }


def gspo(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """Group sequence policy optimisation: Zheng et al. 2025 (arXiv:2507.18071), in the form per token of eqs. 13 and 14.

        s = exp(mean over the response of log ρ);   s_t = sg[s] · π_t / sg[π_t]
        L = max(-A·s_t, -A·clip(s_t, 1 - low, 1 + high))

    s_t has the value of s for all tokens; where the advantages of a response are equal, the gradient is that of the sequence
    form (eqs. 5 and 7). The paper's clips are of another order than PPO's: low 3e-4, high 4e-4. log s_t is at most 10, as in
    verl. There is no dual clip.
    """
    mask = update.mask
    mean = masked(update.logprobs - update.old_logprobs, mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    logprobs = masked(update.logprobs, mask)
    ratio = (logprobs - logprobs.detach() + mean.detach()[:, None]).clamp(max=10.0).exp()
    loss, decides = _clipped(ratio, masked(update.advantages, mask), algorithm)
    return loss, {"pg_clipfrac": _number(decides, update), "ppo_kl": _kl(update)}


def cispo(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """Clipped importance weights: MiniMax-M1 2025 (arXiv:2506.13585) eqs. 4 and 5.

        L = -sg[clip(ρ, 1 - low, 1 + high)] · A · logprob

    so that every token has a gradient. The paper leaves the lower side open: `clip_ratio_low: 1` does.
    """
    ratio = _log_ratio(update).exp().detach()
    weight = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    loss = -weight * masked(update.advantages, update.mask) * masked(update.logprobs, update.mask)
    return loss, {"pg_clipfrac": _number(ratio != weight, update), "ppo_kl": _kl(update)}


def gpg(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """Group policy gradient: Chu et al. 2025 (arXiv:2504.02546), the policy gradient itself without ratio or clip.

    L = -A · logprob
    """
    loss = -masked(update.advantages, update.mask) * masked(update.logprobs, update.mask)
    return loss, {"ppo_kl": _kl(update)}


def clip_cov(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """Clip-Cov: Cui et al. 2025 (arXiv:2505.22617) section 4.2: PPO's clipped loss (without dual clip, as in verl), and 0 for
    the chosen tokens. `pg_clipfrac` counts these."""
    mask, advantages = update.mask, masked(update.advantages, update.mask)
    loss, _ = _clipped(_log_ratio(update).exp(), advantages, algorithm)
    chosen = _chosen(update)
    return masked(loss, ~chosen), {"pg_clipfrac": masked_sum(chosen.float(), mask), "ppo_kl": _kl(update)}


def kl_cov(update: Update, algorithm: AlgorithmConfig) -> tuple[Tensor, Sums]:
    """KL-Cov: Cui et al. 2025 (arXiv:2505.22617) section 4.2: without any clip, and the chosen tokens are charged their distance
    from the old policy (|log ρ|, as in verl). `pg_clipfrac` counts these.

        L = -A·ρ + kl_cov_coef · |log ρ| for chosen tokens
    """
    mask, log_ratio = update.mask, _log_ratio(update)
    chosen = _chosen(update)
    loss = -masked(update.advantages, mask) * log_ratio.exp() + algorithm.kl_cov_coef * masked(log_ratio.abs(), chosen)
    return loss, {"pg_clipfrac": masked_sum(chosen.float(), mask), "ppo_kl": _kl(update)}


LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def clip_decides(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """[B, R] bool: the tokens whose loss PPO's clip decides on, so that they have no gradient."""
    update = Update(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    return _clipped(_log_ratio(update).exp(), masked(advantages, mask), algorithm)[1]


def _log_ratio(update: Update) -> Tensor:
    return masked(update.logprobs - update.old_logprobs, update.mask).clamp(-FARTHEST, FARTHEST)


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The pessimistic one of the plain and the clipped surrogate, and where that is the clipped one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return torch.maximum(plain, clipped), clipped > plain


def _chosen(update: Update) -> Tensor:
    return torch.zeros_like(update.mask) if update.chosen is None else update.chosen & update.mask


def _number(tokens: Tensor, update: Update) -> Tensor:
    return masked_sum(tokens.float(), update.mask)


def _kl(update: Update) -> Tensor:
    return masked_sum(-_log_ratio(update).detach(), update.mask)
