"""What judges single responses on this machine: made from plain settings, the same in a rank's own process and in a worker's."""

import traceback
from typing import Any, Protocol

from rl_core.errors import PpoflowError
from rl_core.rewards.judgement import Failure, Judgement, Sample


class Judge(Protocol):
    """Judges samples.

    Attributes:
        batched: it wants all samples at once; else one at a time.
        home: file whose lines are named where it raises.
    """

    batched: bool
    home: str | None

    def judge(self, samples: list[Sample]) -> list[Judgement | Failure]:
        """One entry for each sample. What it raises is a failure of all of them."""
        ...


def make_judge(kind: str, settings: dict[str, Any]) -> Judge:
    """The judge of a kind of reward.

    Raises:
        ConfigError: a file, module, function or package is missing, or raises when it is imported.
        RewardError: the function takes other arguments.
    """
    if kind == "function":
        from rl_core.rewards.function import FunctionJudge

        return FunctionJudge(**settings)
    if kind == "regex":
        from rl_core.rewards.regex import RegexJudge

        return RegexJudge(**settings)
    if kind == "math":
        from rl_core.rewards.mathematics import MathJudge

        return MathJudge(**settings)
    assert kind == "reasoning_gym", kind
    from rl_core.rewards.reasoning_gym import VerifierJudge

    return VerifierJudge(**settings)


def attempt(judge: Judge, samples: list[Sample]) -> list[Judgement | Failure] | Failure:
    """What the judge says, or why it could not."""
    try:
        return judge.judge(samples)
    except PpoflowError as error:
        return Failure("usage", str(error), error=error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 – users' code raises anything; what is done about it is configured
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == judge.home] or frames
        said = f"raises {type(error).__name__}: {error} (line {own[-1].lineno} of {own[-1].filename})"
        return Failure("error", said, "Mend it; responses of a model can be anything, the empty text included.", error)
