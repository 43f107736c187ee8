"""What a response is worth: `build_reward` makes the configured reward a function of prompts and responses.

A reward model is none: it is a role of the run like the actor, built by `rl_core.models.reward_model`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_core.config.reward import FunctionReward, ModelReward, ReasoningGymReward, RewardConfig
from rl_core.rewards import function, model, reasoning_gym

if TYPE_CHECKING:  # fingerprints are taken in runs that need no pyarrow
    from rl_core.data.prompts import Prompt

Reward = Callable[["list[Prompt]", list[str]], list[float]]


def build_reward(config: RewardConfig) -> Reward | None:
    """The configured reward: prompts and the texts of their responses → one number each. None for a reward model.

    Raises:
        ConfigError: the function's file is missing or broken.
        RewardError: the function takes other arguments; when called, if a sample cannot be judged.
    """
    if isinstance(config, ModelReward):
        return None
    if isinstance(config, ReasoningGymReward):
        return reasoning_gym.Verifier(config)
    return function.UserFunction(config)


def reward_fingerprint(config: RewardConfig) -> dict[str, Any]:
    """What the reward is, as JSON; imports nothing heavy.

    Raises:
        ConfigError: the function's file is missing or no Python, or reasoning-gym is not installed.
        ModelError: there is no such reward model.
    """
    makers: dict[type, Callable[[Any], dict[str, Any]]] = {
        ReasoningGymReward: reasoning_gym.fingerprint,
        FunctionReward: function.fingerprint,
        ModelReward: model.fingerprint,
    }
    return makers[type(config)](config)


def probe(reward: Reward, prompts: "list[Prompt]") -> None:
    """Judge a dummy response to each of these (a few real) prompts, so that a wrong reward is found before a model is loaded.

    Raises:
        RewardError: the reward cannot judge these prompts.
    """
    reward(prompts, ["The answer is 0."] * len(prompts))
