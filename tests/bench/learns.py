"""Does a policy learn, how much and how fast? Base and trained policy on held-out prompts, and the curve between.

    python tests/bench/learns.py CONFIG --output_dir OUT --result FILE.json [--dataset DIR] [--set key=value]…

Trains and evaluates with `rl_core` alone (no Prefect, no MLflow), so it runs where only torch is. Prints and writes one JSON.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from rl_core.config import load_config

KEPT = (
    "step", "critic/score/mean", "response_length/mean", "actor/reference_kl", "actor/entropy", "timing_s/gen",
    "timing_s/update_actor", "timing_s/update_critic", "perf/time_per_step", "perf/throughput", "perf/max_memory_gb",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, help="a tokenized dataset (default: made)")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    output = options.output_dir.absolute()
    output.mkdir(parents=True, exist_ok=True)
    config_path = output / "config.yaml"
    config_path.write_text(yaml.safe_dump(load_config(options.config, options.set).model_dump(mode="json")), encoding="utf-8")

    def ranks(module: str, *arguments: object) -> float:
        start = time.perf_counter()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        subprocess.run([*launcher, "-m", module, "--config_path", config_path, *map(str, arguments)], check=True)
        return round(time.perf_counter() - start, 1)

    dataset = options.dataset.absolute() if options.dataset else output / "dataset"
    given = ["--dataset", dataset] if options.dataset else []
    seconds = {"train": ranks("rl_core.train", "--output_dir", output, *given)}
    results: dict[str, Any] = {}
    for name in ("base", "policy"):
        (output / f"evaluation_{name}").mkdir(exist_ok=True)
        seconds[f"evaluate_{name}"] = ranks(
            "rl_core.evaluate", "--dataset", dataset, "--reference", output / "base", "--model", output / name,
            "--output_dir", output / f"evaluation_{name}",
        )  # fmt: skip
        results[name] = json.loads((output / f"evaluation_{name}" / "result.json").read_text())
        results[name].pop("rewards")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    report = {
        "command": "python " + " ".join([sys.argv[0], *(str(a) for a in sys.argv[1:])]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine(),
        "ranks": options.ranks,
        "torch": torch.__version__,
        "seconds": seconds,
        "training_seconds": round(sum(row["perf/time_per_step"] for row in rows), 1),
        "evaluation": results,
        "curve": [{key: round(row[key], 4) for key in KEPT if key in row} for row in rows],
    }
    options.result.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in report.items() if key != "curve"}, indent=1))


if __name__ == "__main__":
    main()
