"""reasoning-gym's own verifiers as a reward."""

import re
from collections.abc import Callable
from typing import Any

from rl_core.data.generate import create, entry_of, version
from rl_core.digests import canonical
from rl_core.errors import RewardError
from rl_core.rewards.judgement import Failure, Judgement, Sample, read

_NUMBER = re.compile(
    r"""(?:(?<![\w.,)\]])[-−])?               # a sign, unless it stands behind an operand: in "10-3" it subtracts
    (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\d)(?=\.\d))  # 1,234 or 1234, or nothing before .5
    (?:\.\d+)?(?:[eE][-+]?\d+)?""",
    re.VERBOSE,
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_UNPARSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
"""What verifiers raise on responses that they cannot parse (`prime_factorization` on any word)."""


def last_number(text: str) -> str:
    """The last number of a text without its thousands separators; "" where there is none."""
    found = [match for match in _NUMBER.findall(text) if match]
    return found[-1].replace(",", "").replace("−", "-") if found else ""


def answer_tag(text: str) -> str:
    """What stands in the last `<answer>…</answer>`; "" where there is none."""
    found = _TAG.findall(text)
    return found[-1].strip() if found else ""


def _text(text: str) -> str:
    return text


EXTRACT: dict[str, Callable[[str], str]] = {"text": _text, "last_number": last_number, "answer_tag": answer_tag}


class VerifierJudge:
    """Scores by the verifier of the generator that each prompt came from, with that generator's options.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """

    batched = False
    home: str | None = None

    def __init__(self, extract: str) -> None:
        version()
        import reasoning_gym  # noqa: F401 – seconds that should not count as those of the first response

        self._extract = EXTRACT[extract]
        self._generators: dict[bytes, Any] = {}

    def judge(self, samples: list[Sample]) -> list[Judgement | Failure]:
        """Scores, mostly in [0, 1]; a response that the verifier cannot parse gets 0.

        Raises:
            RewardError: a prompt that is not reasoning-gym's.
        """
        return [read(self._score(sample), len(sample.response_ids), may_be_none=False) for sample in samples]

    def _score(self, sample: Sample) -> Any:
        entry = entry_of(sample.extra_info)
        generator = self._generator(sample.extra_info["generator"], entry)
        try:
            return generator.score_answer(self._extract(sample.response), entry)
        except _UNPARSABLE:
            return 0.0

    def _generator(self, spec: dict[str, Any], entry: dict[str, Any]) -> Any:
        key = canonical(spec)
        if key not in self._generators:
            self._generators[key] = create(spec["dataset"], 1, 0, spec["options"])
            oracle = entry["answer"]
            try:
                float(self._generators[key].score_answer(oracle, entry))
            except _UNPARSABLE as error:
                raise RewardError(
                    f"reward.kind = reasoning_gym: the verifier of {spec['dataset']} breaks on its own answer {oracle!r} "
                    f"({type(error).__name__}: {error}). Set reward.kind to function with a verifier of yours."
                ) from error
        return self._generators[key]


def fingerprint(extract: str) -> dict[str, Any]:
    """Settings and version of reasoning-gym."""
    return {"kind": "reasoning_gym", "extract": extract, "version": version()}
