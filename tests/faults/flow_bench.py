"""Whole flows that are struck in every stage: the second part of `make faults`, or

    python -m tests.faults.flow_bench --count 50 --seed 7 --output DIRECTORY

Each case is a real `ppoflow run` of which the flow's process, torchrun's agent or a rank is killed, terminated, stopped for a
while or has its clock set back, as a stage is under way; it is started again, and what is stored, registered and logged is
compared with a flow that nothing struck. Outcomes are appended to DIRECTORY/flows.jsonl as they come; started again, it goes on
behind them. The report is DIRECTORY/flows.json.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.bench import WRONG
from tests.faults.flow_cases import STAGES, FlowCase, flow_cases


def main() -> int:
    """Run the cases; returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, help="only the cases of this one")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    options = parser.parse_args()
    output: Path = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    os.environ["PPOFLOW_HOME"] = str(output / "home")

    from tests.faults.flow_strike import make_flow_world, strike_flow

    world = make_flow_world(output / "flow-world")
    done = {row["case"]["number"] for row in _outcomes(output, options.seed)}
    drawn = flow_cases(options.count, options.seed, world.writes())
    missing = [case for case in drawn if case.number not in done and options.stage in (None, case.stage)]
    print(f"seed {options.seed}: {options.count} flows, {len(done)} of them done already", flush=True)

    def one(case: FlowCase) -> None:
        outcome = strike_flow(world, case, output / f"flow-{case.number}")
        with (output / "flows.jsonl").open("a") as file:
            file.write(json.dumps({"seed": options.seed, **outcome.row()}) + "\n")
        print(f"{case}: {'; '.join(outcome.wrong) or 'well'} ({outcome.seconds:.0f} s)", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, missing))
    report = {"command": " ".join(sys.argv[1:]), **summary(_outcomes(output, options.seed))}
    (output / "flows.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return int(bool(report["wrong cases"]))


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The report of some outcomes."""
    rows = list(rows)
    problems = Counter(problem.split(":")[0] for row in rows for problem in row["wrong"])
    return {
        "flows": len(rows),
        "struck": sum(row["fired"] for row in rows),
        "the same results, registered version and metrics at the end": sum(
            not any(problem.startswith(("different", "hang", "resume")) for problem in row["wrong"]) for row in rows
        ),
        **{said: problems[kind] for kind, said in WRONG.items() if kind != "lost"},
        "wrong cases": [row["case"]["number"] for row in rows if row["wrong"]],
        "by stage": dict(sorted(Counter(row["case"]["stage"] for row in rows).items())),
        "by fault": dict(sorted(Counter(f"{row['case']['how']} to {_whom(row['case'])}" for row in rows).items())),
        "seconds a case": round(sum(row["seconds"] for row in rows) / max(1, len(rows)), 1),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores",
    }


def _whom(case: dict[str, Any]) -> str:
    if case["victim"] != "self":
        return str(case["victim"])
    return "flow" if case["rank"] is None else "rank"


def _outcomes(output: Path, seed: int) -> list[dict[str, Any]]:
    path = output / "flows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row.pop("seed") == seed]


if __name__ == "__main__":
    sys.exit(main())
