"""How long a fully cached `ppoflow run` takes beside a Prefect flow with one empty task, both without a server.

    python tests/bench/cached_run.py [--rounds 3]

The two alternate, so that a noisy machine is noisy for both. Writes results/cached_run.json. The goal is a ratio ≤ 1.5.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RESULT = Path(__file__).parent / "results" / "cached_run.json"
EMPTY_FLOW = """
from tasks.environment import prepare
prepare()
from prefect import flow, task

@task
def nothing():
    pass

@flow
def empty():
    nothing()

empty()
"""


def main() -> None:
    """Measure and write the result."""
    from tests.pipeline import PPOFLOW, environment, tiny_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        config = tiny_config(Path(directory))
        settings = environment(Path(directory) / "home")
        commands = {"cached_run": [*PPOFLOW, "run", str(config)], "empty_flow": [sys.executable, "-c", EMPTY_FLOW]}
        for command in commands.values():
            seconds(command, settings)  # the first of each computes, migrates and compiles
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                times[name].append(seconds(command, settings))
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "command": f"python tests/bench/cached_run.py --rounds {rounds}",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.system()},
        "versions": {name: version(name) for name in ("prefect", "mlflow", "torch")},
        "seconds": times,
        "median_seconds": medians,
        "ratio": round(medians["cached_run"] / medians["empty_flow"], 3),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def seconds(command: list[str], settings: dict[str, str]) -> float:
    """Wall time of a command that must succeed."""
    started = time.perf_counter()
    result = subprocess.run(command, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{command}: exit code {result.returncode}\n{result.stderr}")
    return round(time.perf_counter() - started, 3)


if __name__ == "__main__":
    main()
