"""What a validation found, as a table and as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Step = Literal["load", "wrap", "forward", "gradient"]
STEPS: tuple[Step, ...] = ("load", "wrap", "forward", "gradient")
"""What is tried of a role, in this order; a frozen one has no gradient."""
State = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class Result:
    """One step of one role."""

    role: str
    step: Step
    state: State
    """`skip`: not tried, since something before it failed."""
    found: str = ""
    """What was found, or what is wrong and what mends it."""


@dataclass
class Report:
    """All of a validation."""

    config: str
    ranks: int
    device: str
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the models said while they were built and run."""

    @property
    def ok(self) -> bool:
        """Whether every step passed."""
        return all(result.state == "pass" for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """`ok` and everything else."""
        return {"ok": self.ok, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Report":
        """The other way round."""
        results = [Result(**result) for result in values["results"]]
        return cls(values["config"], values["ranks"], values["device"], results, values["notes"])

    def lines(self) -> list[str]:
        """A table of roles and steps, then what was found, the failures last."""
        states = {(result.role, result.step): result.state for result in self.results}
        roles = list(dict.fromkeys(result.role for result in self.results))
        shown = {"pass": "pass", "fail": "FAIL", "skip": "-"}
        table = [f"{'':<8}" + "".join(f"{step:<10}" for step in STEPS)]
        table += [
            f"{role:<8}" + "".join(f"{shown.get(states.get((role, step), ''), ''):<10}" for step in STEPS) for role in roles
        ]
        failed = [result for result in self.results if result.state == "fail"]
        tried = [result for result in self.results if result.state != "skip"]
        verdict = f"{len(failed)} of {len(tried)} checks failed." if failed else f"All {len(tried)} checks passed."
        return [
            f"{self.config} on {self.ranks} rank(s), {self.device}",
            "",
            *(line.rstrip() for line in table),
            "",
            *_said(self.results, "pass", ""),
            *(f"Note: {note}" for note in self.notes),
            *_said(self.results, "fail", "FAIL "),
            verdict,
        ]


def _said(results: list[Result], state: State, mark: str) -> list[str]:
    """Lines of one state by step; roles of which the same is said share one."""
    shared: dict[tuple[Step, str], list[str]] = {}
    for result in results:
        if result.state == state:
            shared.setdefault((result.step, result.found), []).append(result.role)
    order = sorted(shared.items(), key=lambda item: STEPS.index(item[0][0]))
    return [
        f"{mark}{step}, {found}" if found.startswith(f"{roles[0]} (") else f"{mark}{step}, {', '.join(roles)}: {found}"
        for (step, found), roles in order
    ]
