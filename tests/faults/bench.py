"""The bulk of the faults: `make faults N=200 SEED=7`, or

    python -m tests.faults.bench --count 200 --seed 7 --output DIRECTORY

Each case is a training on two ranks that is struck at a point of one of its phases, and goes on; afterwards it is compared, bit
by bit, with the one that nothing struck. Outcomes are appended to DIRECTORY/outcomes.jsonl as they come; started again, it goes
on behind them. The report (report.json, and on stdout) counts cases by phase and what went wrong.

With --mutants it then plants faults in saving and resuming, of which it must see each; with --behaviours rewards hang and raise,
and numbers are not finite.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WRONG = {
    "orphan": "orphans", "lost": "lost checkpoints", "corrupt": "silent corruptions", "different": "not bit-identical",
    "exit code": "wrong exit codes", "hang": "hangs", "resume": "resumed elsewhere",
    "leaving": "leavings",
}  # fmt: skip


def main() -> int:
    """Run the cases; returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--output", type=Path, default=Path(".faults"))
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, of two ranks each")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--behaviours", action="store_true")
    options = parser.parse_args()
    output: Path = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    os.environ["PPOFLOW_HOME"] = str(output / "home")

    from tests.faults import forked

    forked.preload()
    from tests.faults.behaviours import BEHAVIOURS, misbehave
    from tests.faults.cases import cases
    from tests.faults.mutants import MUTANTS
    from tests.faults.strike import strike
    from tests.faults.world import make_world

    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3))
    done = _outcomes(output, seed)
    print(f"seed {seed}: {options.count} cases, {len(done)} of them done already", flush=True)
    world = make_world(output / "world")
    missing = [case for case in cases(options.count, seed) if case.number not in done]

    def some(job: int) -> None:
        for case in missing[job :: options.jobs]:
            outcome = strike(world, case, output / f"case-{job}")
            with (output / "outcomes.jsonl").open("a") as file:
                file.write(json.dumps({"seed": seed, **outcome.row()}) + "\n")
            print(f"{case}: {'; '.join(outcome.wrong) or 'well'} ({outcome.seconds:.0f} s)", flush=True)

    forked.at_once(options.jobs, some)
    report = summary(seed, _outcomes(output, seed).values()) | {"asked for": options.count, "jobs": options.jobs}
    if options.mutants:
        caught = {name: strike(world, case, output / "case", mutate).wrong for name, (mutate, case) in MUTANTS.items()}
        report["mutants"] = {name: wrong[:2] or "not seen" for name, wrong in caught.items()}
    if options.behaviours:
        report["behaviours"] = {name: misbehave(world, name, output / "case") or "as it must be" for name in BEHAVIOURS}
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    unseen = "not seen" in report.get("mutants", {}).values()
    unlike = set(map(str, report.get("behaviours", {}).values())) - {"as it must be"}
    return int(bool(report["wrong cases"]) or unseen or bool(unlike))


def summary(seed: int, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The report of some outcomes."""
    rows = list(rows)
    struck = [row for row in rows if row["fired"]]
    problems = Counter(problem.split(":")[0] for row in rows for problem in row["wrong"])
    elastic = [row for row in rows if row["case"]["ranks"] != 2]
    return {
        "seed": seed,
        "cases": len(rows),
        "struck": len(struck),
        "resumed": sum(row["resumed_from"] is not None for row in rows),
        "resumed on another number of ranks": sum(row["resumed_from"] is not None for row in elastic),
        "bit-identical at the end (the same draws and nearly the same numbers on another number of ranks)": sum(
            not any(problem.startswith(("different", "hang", "exit code")) for problem in row["wrong"]) for row in rows
        ),
        **{said: problems[kind] for kind, said in WRONG.items()},
        "wrong cases": [row["case"]["number"] for row in rows if row["wrong"]],
        "by phase": dict(sorted(Counter(row["case"]["point"] for row in rows).items())),
        "by fault": dict(sorted(Counter(f"{row['case']['how']} to {row['case']['victim']}" for row in rows).items())),
        "seconds a case": round(sum(row["seconds"] for row in rows) / max(1, len(rows)), 1),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores",
    }


def _outcomes(output: Path, seed: int) -> dict[int, dict[str, Any]]:
    path = output / "outcomes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["case"]["number"]: row for row in rows if row.pop("seed") == seed}


if __name__ == "__main__":
    sys.exit(main())
