"""A user's Python function as a reward, with verl's signature `(data_source, solution_str, ground_truth, extra_info)`."""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_core.config.reward import FunctionReward
from rl_core.errors import RewardError
from rl_core.user_code import code_fingerprint, load_function

if TYPE_CHECKING:  # fingerprints are taken in runs that need no pyarrow
    from rl_core.data.prompts import Prompt

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


class UserFunction:
    """Calls the function for each sample, arguments by keyword. It returns a number, or a dict with one under `score`.

    Raises:
        RewardError: no such file or function, the file raises, or the function does not take the four arguments.
    """

    def __init__(self, config: FunctionReward) -> None:
        self._name = f"{config.name} in {config.path}"
        self._function = _load(config)

    def __call__(self, prompts: "list[Prompt]", responses: list[str]) -> list[float]:
        """One number for each response.

        Raises:
            RewardError: the function raises, or returns no finite number; the sample is named.
        """
        return [self._score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def _score(self, prompt: "Prompt", response: str) -> float:
        sample = (
            f"prompt {prompt.prompt_id[:12]} {_short(prompt.question)}, response {_short(response)}, "
            f"ground_truth {_short(prompt.ground_truth)}"
        )
        try:
            value = self._function(
                data_source=prompt.data_source,
                solution_str=response,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"reward: {self._name} raises {type(error).__name__}: {error} on {sample}. Mend it; responses of a model can be "
                "anything, the empty text included."
            ) from error
        score = value.get("score") if isinstance(value, dict) else value
        if not isinstance(score, numbers.Real) or not math.isfinite(score):
            what = (
                "a dict without a number under 'score'"
                if isinstance(value, dict) and not isinstance(score, numbers.Real)
                else "that"
            )
            raise RewardError(
                f"reward: {self._name} returns {_short(value)} on {sample}; {what} is no finite number. Return a float, or a "
                "dict with a float under 'score'."
            )
        return float(score)


def fingerprint(config: FunctionReward) -> dict[str, Any]:
    """Name of the function, digests of its file and of what that imports from its own directory. Runs nothing of it.

    Raises:
        ConfigError: no such file, or one that is no Python.
    """
    return {"kind": "function", "name": config.name, **code_fingerprint(config.path, "reward")}


def _load(config: FunctionReward) -> Callable[..., Any]:
    function = load_function(config.path, config.name, "reward")
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise RewardError(
            f"reward.name = {config.name}: the function in {config.path} takes {inspect.signature(function)} ({error}); it must "
            f"take the keyword arguments {', '.join(ARGUMENTS)}."
        ) from None
    return function


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
