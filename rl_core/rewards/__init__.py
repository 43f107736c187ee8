"""What a response is worth: `build_reward` makes the configured reward a function of prompts and responses.

A reward model is none: it is a role of the run like the actor, built by `rl_core.models.reward_model`; `rl_core.scoring` puts
both together. Nothing is imported here but what a judge's process needs (`rl_core.rewards.worker`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_core.rewards.judgement import Judgement

if TYPE_CHECKING:
    from rl_core.config.reward import RewardConfig
    from rl_core.data.prompts import Prompt

__all__ = ["Judgement", "Reward", "build_reward", "probe", "reward_fingerprint"]

Reward = Callable[["list[Prompt]", list[str], list[list[int]]], list[Judgement]]
"""Prompts, the texts of their responses (without special tokens) and their tokens (end token included) → one judgement each.

Raises RewardError where a response cannot be judged and `on_error` says to stop.
"""


def build_reward(config: "RewardConfig", answer_column: str | None = None, field: str = "reward") -> Reward | None:
    """The configured reward, but for a reward model: None where there is nothing but a model.

    Args:
        answer_column: `data.answer_column`; a function with TRL's signature gets `ground_truth` under this name too.
        field: the section, for messages.

    Raises:
        ConfigError: a file, module, function, package or environment variable is missing, or raises when it is imported.
        RewardError: the function takes other arguments.
    """
    from rl_core.config.reward import (
        FunctionReward,
        HttpReward,
        MathReward,
        ModelReward,
        ReasoningGymReward,
        RegexReward,
        WeightedReward,
    )
    from rl_core.rewards.policy import JudgedReward

    def judged(settings: dict[str, Any], name: str) -> Reward:
        assert isinstance(config, (FunctionReward, MathReward, ReasoningGymReward, RegexReward))
        return JudgedReward(config, config.kind, settings, name, field)

    match config:
        case ReasoningGymReward():
            return judged({"extract": config.extract}, "reasoning-gym's verifier")
        case FunctionReward():
            settings = config.model_dump(include={"path", "module", "name", "completions"})
            name = f"{config.name} in {config.path or config.module}"
            return judged({**settings, "field": field, "answer_column": answer_column}, name)
        case MathReward():
            return judged({"field": field}, "math-verify")
        case RegexReward():
            return judged(config.model_dump(include={"pattern", "group", "normalise"}), "the pattern")
        case HttpReward():
            from rl_core.rewards.http import HttpEndpoint

            return HttpEndpoint(config, field)
        case WeightedReward():
            from rl_core.rewards.weighted import WeightedSum, distinct

            places = {f"{field}.parts[{number}].reward": part for number, part in enumerate(config.parts)}
            rewards = [build_reward(part.reward, answer_column, place) for place, part in places.items()]
            names = distinct([getattr(part.reward, "name", part.reward.kind) for part in config.parts])
            built = zip(names, config.parts, rewards, strict=True)
            parts = [(name, part.weight, reward) for name, part, reward in built if reward is not None]
            return WeightedSum(parts) if parts else None
        case ModelReward():
            return None


def reward_fingerprint(config: "RewardConfig", field: str = "reward") -> dict[str, Any]:
    """What the reward is, as JSON: digests of files, versions of libraries, settings that decide a score; no secret, no limit of
    time. Imports nothing heavy.

    Raises:
        ConfigError: the function's file is missing or no Python, or a package is not installed.
        ModelError: there is no such reward model.
    """
    from rl_core.config.reward import (
        FunctionReward,
        HttpReward,
        MathReward,
        ModelReward,
        ReasoningGymReward,
        RegexReward,
        WeightedReward,
    )
    from rl_core.rewards import function, mathematics, model, reasoning_gym

    match config:
        case WeightedReward():
            places = {f"{field}.parts[{number}].reward": part for number, part in enumerate(config.parts)}
            parts = [[part.weight, reward_fingerprint(part.reward, place)] for place, part in places.items()]
            return {"kind": "weighted", "parts": parts}
        case ModelReward():
            return model.fingerprint(config)
        case FunctionReward():
            what = function.fingerprint(config.path, config.module, config.name, config.completions, field)
        case MathReward():
            what = {"kind": "math", "version": mathematics.version(field)}
        case ReasoningGymReward():
            what = reasoning_gym.fingerprint(config.extract)
        case RegexReward():
            what = config.model_dump(mode="json", include={"kind", "pattern", "group", "normalise"})
        case HttpReward():
            what = {"kind": "http", "url": config.url}
    return what | ({"error_value": config.error_value} if config.on_error == "value" else {})


def probe(reward: Reward, prompts: "list[Prompt]") -> None:
    """Judge a dummy response to each of these (a few real) prompts, so that a wrong reward is found before a model is loaded.

    Raises:
        RewardError: the reward cannot judge these prompts; also where `on_error = value` would bear that of each of them.
    """
    from rl_core.errors import RewardError

    judgements = reward(prompts, ["The answer is 0."] * len(prompts), [[0]] * len(prompts))
    failures = {judgement.failed for judgement in judgements if judgement.failed in ("timeout", "error", "invalid")}
    if judgements and all(judgement.failed in failures for judgement in judgements):
        kinds = ", ".join(sorted(map(str, failures)))
        raise RewardError(
            f"reward: none of {len(judgements)} responses on trial could be judged ({kinds}); the warning above says why. "
            "reward.on_error = value is for single responses; mend the reward."
        )
