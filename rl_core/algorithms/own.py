"""A user's own estimator or loss: found once, and what it returns looked at before anything is learned from it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked
from rl_core.config.algorithm import UserEstimator, UserPolicyLoss
from rl_core.errors import ConfigError
from rl_core.user_code import load_function


def own_function(own: UserEstimator | UserPolicyLoss) -> Callable[..., Any]:
    """The function that a section names; the file is imported once in a process.

    Raises:
        ConfigError: no such file or function, or the file raises.
    """
    return _load(own.path, own.name, field_of(own))


def field_of(own: UserEstimator | UserPolicyLoss) -> str:
    """The section's name, for messages."""
    return "algorithm.adv_estimator" if isinstance(own, UserEstimator) else "algorithm.policy_loss"


def checked(own: UserEstimator | UserPolicyLoss, what: str, value: Any, mask: Tensor) -> Tensor:
    """A tensor [B, R] that the user's function returned, set to 0 where the mask is false.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, Tensor) or value.shape != mask.shape or not torch.is_floating_point(value):
        got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise wrong(own, f"{what} must be a floating-point tensor of shape {tuple(mask.shape)}, as the mask; it is {got}")
    if value.device != mask.device:
        raise wrong(own, f"{what} is on {value.device}, and what it was given is on {mask.device}")
    return masked(value, mask)


def wrong(own: UserEstimator | UserPolicyLoss, why: str) -> ConfigError:
    """The error that says what is wrong with what the user's function returned."""
    return ConfigError(f"{field_of(own)}: {own.name} in {own.path} returned something unusable: {why}.")


@cache
def _load(path: str, name: str, field: str) -> Callable[..., Any]:
    return load_function(path, name, field)
