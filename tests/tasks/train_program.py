"""Stands where `rl_core.train` stands: the same command line, files and exit codes, and a "training" of no time.

`PPOFLOW_TEST_CRASH_AT=N` crashes it before step N (counted from 0) with the checkpoint of the steps before committed.
"""

from rl_core.process import die_with_parent

die_with_parent()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
from pathlib import Path  # noqa: E402

from rl_core.artifacts import commit, fresh_scratch, open_artifact  # noqa: E402
from rl_core.config import load_config  # noqa: E402
from rl_core.locks import locked  # noqa: E402


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    for name in ("config_path", "output_dir", "dataset", "base"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    run: Path = options.output_dir
    config = load_config(options.config_path)
    total = config.total_steps(open_artifact(options.dataset).results["train_rows"])
    crash_at = int(os.environ.get("PPOFLOW_TEST_CRASH_AT", "-1"))
    with locked(run / "ranks.lock", shared=True):
        done = max((int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")), default=0)
        print(f"from {done} to {total}")
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:done] if done else []
        (run / "metrics.jsonl").write_text("".join(lines))
        for step in range(done, total):
            if step == crash_at:
                raise RuntimeError("out of luck")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "critic/score/mean": step / 10}) + "\n")
            write(run / "checkpoints" / f"step_{step + 1:06d}", "checkpoint", step + 1)
        write(run / "policy", "policy", total)


def write(final: Path, kind: str, step: int) -> None:
    """Commit a directory of one file."""
    shutil.rmtree(final, ignore_errors=True)
    scratch = fresh_scratch(final)
    (scratch / "model.safetensors").write_text(f"weights after {step} steps")
    commit(scratch, final, kind=kind, key="0", results={"step": step})


if __name__ == "__main__":
    main()
