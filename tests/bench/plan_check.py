"""What `ppoflow plan` predicts for cases of `ppo_step.py`, and how far from it the measured peaks are.

    python tests/bench/plan_check.py --out PREDICTIONS.json
    python tests/bench/plan_check.py --out PREDICTIONS.json --measured MEASURED.json…

The first writes a prediction for each of `CASES`, with the command that measures it; no GPU is needed. Predictions are committed
before the measurement. The second adds the measured `gib_peak` of the case of the same name and settings, leaves the predictions
as they are, and exits with 2 where one is more than a tenth off. Checkpoints are not part of it: `ppo_step.py` has none.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ppo_step
import transformers

from rl_core.tools.plan_memory import phases
from rl_core.tools.plan_models import Model
from rl_core.tools.plan_roles import Situation

PROMPT = 107
"""`ppo_step.py --prompt_tokens` where nothing is said."""
LORA = "{rank: 32, alpha: 64}"
SHAPES = {"qwen2.5-3b": ppo_step._shape(151936, 2048, 11008, 36, 16, 2, True)} | ppo_step.SHAPES
CASES: dict[str, tuple[str, list[str]]] = {
    "1.5B, all weights": ("qwen2-1.5b", []),
    "3B, all weights, offloaded": ("qwen2.5-3b", ["fsdp.param_offload=true", "fsdp.optimizer_offload=true"]),
    "7B, adapters": ("qwen2-7b", [f"actor.lora={LORA}", f"critic.lora={LORA}"]),
    # Chosen after the formulas were committed:
    "1.5B, recomputed, long rows, 8-bit moments": (
        "qwen2-1.5b",
        [
            "fsdp.activation_checkpointing=true", "rollout.max_new_tokens=1024", "actor.optimizer=adamw8bit",
            "critic.optimizer=adamw8bit",
        ],
    ),
    "3B, no critic, gathered until the backward": (
        "qwen2.5-3b",
        ["algorithm.adv_estimator=grpo", "rollout.n=4", "trainer.train_batch_size=16", "fsdp.reshard_after_forward=false"],
    ),
}  # fmt: skip
TOLERANCE = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measured", type=Path, nargs="+", default=[], help="files that ppo_step.py wrote")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if options.measured:
        _compare(known, options.measured)
    else:  # what is committed already stays
        known |= {name: _predicted(name, *case) for name, case in CASES.items() if name not in known}
    options.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    for name, case in known.items():
        off = f"{case['off']:+.1%}" if "off" in case else "not measured"
        print(f"{name:32} {case['gib_predicted']:8.2f} GiB in {case['phase']:14} {off}")
    return 2 if any(abs(case.get("off", 0.0)) > TOLERANCE for case in known.values()) else 0


def _predicted(name: str, shape: str, settings: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        transformers.Qwen2Config(**SHAPES[shape], max_position_embeddings=32768).save_pretrained(base)
        config = ppo_step._config(base, argparse.Namespace(warm=1, steps=2, set=[]), settings).settled(1)
        situation = Situation(config=config, model=Model(base), judge=None, ranks=1, per_node=1, prompt=PROMPT)
        ranks = phases(situation)
    run = [phase for rank in ranks for phase in rank if phase.name not in ("going on", "save")]
    worst = max(run, key=lambda phase: phase.total)
    command = ["python", "tests/bench/ppo_step.py", "--out", "FILE.json", "--shape", shape, "--case", name, *settings]
    return {
        "command": shlex.join(command),
        "settings": settings,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "gib_predicted": _gib(worst.total),
        "phase": worst.name,
        "gib": {part: _gib(size) for part, size in worst.bytes.items() if size},
        "gib_of_phases": {phase.name: _gib(phase.total) for phase in run},
    }


def _compare(known: dict[str, Any], files: list[Path]) -> None:
    for path in files:
        report = json.loads(path.read_text(encoding="utf-8"))
        for name, case in report["cases"].items():
            if name in known and case["settings"] == known[name]["settings"]:
                measured = case["gib_peak"]
                known[name] |= {"gib_measured": measured, "off": round(known[name]["gib_predicted"] / measured - 1, 4)}
                known[name]["measured_on"] = {key: report[key] for key in ("device", "torch", "transformers")}


def _gib(size: int) -> float:
    return round(size / 2**30, 2)


if __name__ == "__main__":
    sys.exit(main())
