"""What a regular expression finds in the response, compared with the right answer."""

import re
from decimal import Decimal, InvalidOperation

from rl_core.rewards.judgement import Failure, Judgement, Sample


class RegexJudge:
    """1 where they are equal, else 0; see `RegexReward`."""

    batched = False
    home: str | None = None

    def __init__(self, pattern: str, group: int | str, normalise: bool) -> None:
        self._pattern, self._group, self._normalise = re.compile(pattern), group, normalise

    def judge(self, samples: list[Sample]) -> list[Judgement | Failure]:
        """One judgement for each sample."""
        return [Judgement(float(self._equal(sample))) for sample in samples]

    def _equal(self, sample: Sample) -> bool:
        found = list(self._pattern.finditer(sample.response))
        text = found[-1][self._group] if found else None
        if text is None or sample.ground_truth is None:
            return False
        if not self._normalise:
            return bool(text == sample.ground_truth)
        return normal(text) == normal(sample.ground_truth)


def normal(text: str) -> Decimal | str:
    """A number where the text is one, with or without thousands separators, else the text without case and extra white space."""
    text = " ".join(text.split()).casefold()
    plain = text.replace("−", "-").strip("$% ").removesuffix(".").replace("-$", "-")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", plain):
        plain = plain.replace(",", "")
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text
