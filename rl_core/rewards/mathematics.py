"""Mathematical answers compared as what they mean, by math-verify (https://github.com/huggingface/math-verify)."""

import logging
from importlib import metadata
from typing import Any

from rl_core.errors import ConfigError
from rl_core.rewards.judgement import Failure, Judgement, Sample, short


class MathJudge:
    """1 where the answers are equal, else 0; see `MathReward`.

    math-verify's own limit of time is off: it is an alarm signal, which reaches only the main thread, and there only between two
    steps of the interpreter, so that a power of large numbers runs on. `reward.timeout_s` ends such a thing.

    Raises:
        ConfigError: math-verify is not installed.
    """

    batched = False
    home: str | None = None

    def __init__(self, field: str) -> None:
        version(field)
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        for name in ("math_verify.parser", "math_verify.grader"):  # they warn that there is no limit
            logging.getLogger(name).setLevel(logging.ERROR)
        self._kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
        self._parse, self._verify = parse, verify

    def judge(self, samples: list[Sample]) -> list[Judgement | Failure]:
        """One judgement for each sample."""
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Judgement | Failure:
        truth = sample.ground_truth or ""
        forms = [f"${truth}$", truth]  # bare LaTeX is found between dollar signs only
        if "$" in truth or "\\boxed" in truth:
            forms.reverse()
        right = self._read(forms[0]) or self._read(forms[1])
        if not right:
            said = f"finds no answer in the ground_truth {short(truth)}"
            return Failure("error", said, "Let data.answer_column name the column of the answers, in LaTeX or as numbers.")
        return Judgement(float(self._verify(right, self._read(sample.response), timeout_seconds=None)))

    def _read(self, text: str) -> Any:
        return self._parse(text, self._kinds, parsing_timeout=None)


def version(field: str) -> str:
    """The installed version of math-verify.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return metadata.version("math-verify")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{field}.kind = math needs math-verify: pip install 'ppoflow[math]' (or math-verify).") from None
