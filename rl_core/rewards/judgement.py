"""What a reward says of a response, and how the values that users' functions and services return are read."""

import math
import numbers
from typing import Any, NamedTuple

NOT_APPLICABLE = "not_applicable"
LARGEST = 3.4028234e38
"""Scores become numbers of 32 bits."""


class Sample(NamedTuple):
    """A prompt with a response, as judges get it: plain values, so that a judge's process needs no library to receive it."""

    prompt_id: str
    question: str
    ground_truth: str | None
    data_source: str
    extra_info: dict[str, Any]
    response: str
    """Its text without special tokens."""
    response_ids: list[int]
    """Its tokens, end token included."""

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_id[:12]} {short(self.question)}, response {short(self.response)}, "
            f"ground_truth {short(self.ground_truth)}"
        )


class Judgement(NamedTuple):
    """What a response is worth."""

    score: float
    """NaN: the reward does not apply to it."""
    tokens: list[float] | None = None
    """One number per token of the response, of which `score` is the sum; None: the score falls at the last token."""
    extras: dict[str, float] = {}  # noqa: RUF012 – never changed
    """Further numbers, by name."""
    failed: str | None = None
    """Why `score` is none that the reward gave: `timeout`, `error` or `invalid`, or `not_applicable`."""


class Failure(NamedTuple):
    """Why there is no judgement."""

    kind: str
    """`timeout`, `error`, `invalid`, or `usage`: the reward does not fit the prompts, whatever the response."""
    said: str
    """What it did, after its name: `raises ValueError: …`; for `usage` the whole message."""
    remedy: str = ""
    error: BaseException | None = None
    """Not known where it happened in another process."""


def short(value: Any) -> str:
    """A value's `repr`, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"


def read(value: Any, length: int, may_be_none: bool) -> Judgement | Failure:
    """Read what was returned for one response.

    It may be a number; a list of numbers, one for each token; or a dict with either under `score` or `tokens`, whose other
    numbers become `extras`. NumPy's and torch's values count as what they hold.

    Args:
        length: tokens of the response.
        may_be_none: None says that the reward does not apply to the response.
    """
    extras: dict[str, float] = {}
    score = value
    if isinstance(value, dict):
        if ("score" in value) == ("tokens" in value):
            return _invalid(
                value, "a dict without a number under 'score'" if "score" not in value else "score and tokens at once"
            )
        score = value["score"] if "score" in value else value["tokens"]
        extras = {str(name): float(item) for name, item in value.items() if name not in ("score", "tokens") and _finite(item)}
    if hasattr(score, "tolist"):  # NumPy, torch
        score = score.tolist()
    if score is None and may_be_none:
        return Judgement(math.nan, None, extras, NOT_APPLICABLE)
    if isinstance(score, (list, tuple)):
        if len(score) != length:
            return _invalid(value, f"{len(score)} numbers for the {length} tokens of the response (its end token included)")
        if not all(map(_finite, score)):
            return _invalid(value, "not a finite number for each token")
        tokens = [float(item) for item in score]
        if not _finite(math.fsum(tokens)):
            return _invalid(value, "no finite number in 32 bits when added up")
        return Judgement(math.fsum(tokens), tokens, extras)
    if not _finite(score):
        return _invalid(value, "no finite number")
    return Judgement(float(score), None, extras)


def _finite(value: Any) -> bool:
    real = isinstance(value, numbers.Real)
    return real and bool(abs(value) <= LARGEST)  # NaN is not


def _invalid(value: Any, what: str) -> Failure:
    remedy = "Return a float, a dict with a float under 'score', or a list with a float for each token of the response."
    return Failure("invalid", f"returns {short(value)}, which is {what},", remedy)
