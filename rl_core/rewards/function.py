"""A user's Python function as a reward, with verl's signature `(data_source, solution_str, ground_truth, extra_info)`."""

import difflib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config.reward import FunctionReward
from rl_core.digests import digest_file, digest_files, digest_json
from rl_core.errors import RewardError
from rl_core.rewards.imports import local_imports

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
        RewardError: no such file, or one that is no Python.
    """
    path = _file(config)
    folder, imports = path.resolve().parent, digest_files(local_imports(path))
    return {
        "kind": "function",
        "name": config.name,
        "sha256": digest_file(path),
        "imports": {str(file.relative_to(folder)): digest for file, digest in imports.items()},
    }


def _file(config: FunctionReward) -> Path:
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise RewardError(f"reward.path = {config.path}: there is no such file (looked from {Path.cwd()}).")
    return path


def _load(config: FunctionReward) -> Callable[..., Any]:
    path = _file(config)
    spec = importlib.util.spec_from_file_location(f"ppoflow_reward_{digest_json(str(path.resolve()))}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.path = {config.path} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, typing and pickle look a class's module up there
    # While it is imported, its own directory comes first, as for a script; later imports inside functions find it last, so that
    # a file there cannot take the place of a library.
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward.path = {config.path} cannot be imported: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)
    function = getattr(module, config.name, None)
    if not callable(function):
        known = [
            name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        close = difflib.get_close_matches(config.name, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'no function'}"
        raise RewardError(f"reward.name = {config.name}: {config.path} has no such function ({hint}).")
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
