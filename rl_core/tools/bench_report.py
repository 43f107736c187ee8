"""What the benches of single parts report: the same work done in several ways, in turn, and how many times as fast ours is."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

OURS = "ppoflow"


class Done(NamedTuple):
    """One call of one way."""

    amount: float
    """Bytes, tokens or FLOPs of work."""
    seconds: float


def compare(unit: str, ways: Mapping[str, Callable[[], Done]], rounds: int, **more: Any) -> dict[str, Any]:
    """Call each way in turn, round after round, so that whatever else the machine does meets all of them alike.

    Args:
        unit: of the amounts.
        ways: by name; ours first.
        more: further entries of the result.

    Returns:
        `unit`; `ways`: by name the `seconds` of each round and the median rate `per_s`; `ratios`: our rate over each other's.
    """
    found: dict[str, list[Done]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            done = way()
            found[name].append(done)
            print(f"Round {number + 1} of {rounds}: {name}: {done.seconds:.3f} s", flush=True)
    rates = {name: statistics.median(done.amount / done.seconds for done in calls) for name, calls in found.items()}
    ours, *others = rates
    return {
        "unit": unit,
        "ways": {
            name: {"seconds": [round(done.seconds, 4) for done in found[name]], "per_s": rate} for name, rate in rates.items()
        },
        "ratios": {name: round(rates[ours] / rates[name], 3) for name in others},
        **more,
    }

