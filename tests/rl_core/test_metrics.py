"""The files of a run: what is kept when it goes on."""

import json
from pathlib import Path

import torch

from rl_core.distributed import World
from rl_core.metrics import RunLog

STRANGE = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
"""Where Python's `splitlines` sees ends of lines and JSON none."""


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def log(directory: Path, first_step: int) -> RunLog:
    return RunLog(directory, World(0, 1, torch.device("cpu")), total_steps=5, first_step=first_step, progress=False)


def test_what_a_run_logged_behind_its_last_checkpoint_is_dropped_whatever_is_in_it(tmp_path: Path) -> None:
    first = log(tmp_path, 0)
    for step in range(3):
        first.step(step, {"critic/score/mean": 1.0}, [{"response": STRANGE}])
    with (tmp_path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "resp')  # killed in the middle
    for name in ("metrics.jsonl", "samples.jsonl"):
        written = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"garbage\n[1]\n{}\n\xff\xfe\n" + written)
    log(tmp_path, 2)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1]
    assert lines(tmp_path / "samples.jsonl") == [{"step": step, "response": STRANGE} for step in range(2)]
