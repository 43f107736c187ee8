"""What a tokenization counted, summed over its blocks."""

import math
from collections import Counter
from typing import Any

from rl_core.errors import DataError

_EXAMPLES = 3
_BINS = 20


class Stats:
    """Rows, lengths and dropped rows of one block, or of several in order."""

    def __init__(self) -> None:
        self.rows = 0
        self.truncated = 0
        self.lengths: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, list[dict[str, Any]]] = {}
        self.first_dropped: dict[str, Any] | None = None

    def keep(self, length: int, truncated: bool) -> None:
        """Count a prompt of `length` tokens."""
        self.lengths[length] += 1
        self.truncated += truncated

    def drop(self, index: int, reason: str, detail: str, text: str) -> None:
        """Count a row that is left out; the first of each reason are kept as examples."""
        example = {"index": index, "reason": reason, "detail": detail, "text": text[:200]}
        self.dropped[reason] += 1
        if self.first_dropped is None or index < self.first_dropped["index"]:
            self.first_dropped = example
        if len(self.examples.setdefault(reason, [])) < _EXAMPLES:
            self.examples[reason].append(example)

    def add(self, other: "Stats") -> None:
        """Sum up with the stats of rows behind these."""
        self.rows += other.rows
        self.truncated += other.truncated
        self.lengths += other.lengths
        self.dropped += other.dropped
        self.first_dropped = self.first_dropped or other.first_dropped
        for reason, examples in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + examples)[:_EXAMPLES]

    def check_share(self, limit: float, total: int) -> None:
        """Refuse more dropped rows than `limit` × `total`.

        Raises:
            DataError: naming the first such row.
        """
        dropped = self.dropped.total()
        if dropped > limit * total:
            first = self.first_dropped
            assert first is not None
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
            raise DataError(
                f"data.max_dropped_share = {limit:g}: {dropped} of the first {self.rows} rows (of {total}) cannot be used "
                f"({reasons}). The first is row {first['index']}, {first['reason']}: {first['detail']}; it reads "
                f"{first['text']!r}. Mend the data, or raise data.max_dropped_share to leave such rows out."
            )

    def to_json(self) -> dict[str, Any]:
        """As JSON, for a note; `from_json` reads it."""
        return {**vars(self), "lengths": sorted(self.lengths.items()), "dropped": dict(sorted(self.dropped.items()))}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Stats":
        """What `to_json` gave."""
        stats = cls()
        vars(stats).update(value, lengths=Counter(dict(value["lengths"])), dropped=Counter(value["dropped"]))
        return stats

    def summary(self) -> dict[str, Any]:
        """For people: counts, dropped rows by reason with examples, lengths in tokens (nearest-rank percentiles)."""
        longest = max(self.lengths)
        width = math.ceil(longest / _BINS)
        bins: Counter[int] = Counter()
        for length, count in self.lengths.items():
            bins[(length - 1) // width] += count
        return {
            "rows": self.rows,
            "truncated": self.truncated,
            "dropped": {
                reason: {"rows": count, "examples": self.examples[reason]} for reason, count in sorted(self.dropped.items())
            },
            "prompt_length": {
                "min": min(self.lengths),
                "mean": sum(length * count for length, count in self.lengths.items()) / self.lengths.total(),
                "p50": self._percentile(50),
                "p95": self._percentile(95),
                "max": longest,
                "histogram": [
                    {"from": index * width + 1, "to": (index + 1) * width, "prompts": bins[index]}
                    for index in range(max(bins) + 1)
                ],
            },
        }

    def _percentile(self, percent: int) -> int:
        rank = math.ceil(percent / 100 * self.lengths.total())
        for length, count in sorted(self.lengths.items()):
            rank -= count
            if rank <= 0:
                return length
        raise AssertionError("no lengths")
