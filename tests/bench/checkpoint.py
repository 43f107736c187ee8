"""How fast a checkpoint reaches the disk, against `dd conv=fsync` on the same disk in the same run, and what a training waits.

    python tests/bench/checkpoint.py [--gigabytes 2] [--ranks 1] [--rounds 3] [--directory DIR] [--output RESULT.json]

In each round dd writes as many bytes, then `Checkpoints.save` writes tensors of that size: planning, serialising, hashing,
manifest, fsync and rename. The ratio is that of the medians. Then a `Saver` saves the same in its thread: the seconds until
`begin` returned and until the copy was made are the most that a training loses.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def dd(directory: Path, size: int) -> float:
    """Bytes a second."""
    path = directory / "dd"
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={size // 2**24}", "conv=fsync"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"}).stderr
    path.unlink()
    written, seconds = re.findall(r"(\d+) bytes.*, ([\d.]+) s,", said)[0]
    return int(written) / float(seconds)


def measure(rank: int, directory: Path, size: int, rounds: int) -> dict[str, Any]:
    """On each rank; rank 0 tells."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from rl_core.checkpoint.saver import Saver
    from rl_core.checkpoint.steps import Checkpoints

    os.environ["PPOFLOW_HOME"] = str(directory / "home")
    ranks, each = dist.get_world_size(), 2**25
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = {
        f"t{number}": DTensor.from_local(torch.rand(each // ranks // 1024, 1024), mesh, [Shard(0)])
        for number in range(size // (4 * each))
    }
    total = sum(tensor.numel() * 4 for tensor in tensors.values())
    checkpoints = Checkpoints(directory / "checkpoints", 2, process_group=dist.new_group(backend="gloo"))
    found: dict[str, list[float]] = {"dd": [], "save": []}
    for number in range(1, rounds + 1):
        if rank == 0:
            found["dd"].append(dd(directory, size))
        dist.barrier()
        began = time.perf_counter()
        checkpoints.save(number, tensors, {}, "key")
        found["save"].append(total / (time.perf_counter() - began))
    saver = Saver(checkpoints, background=True)
    began = time.perf_counter()
    saver.begin(rounds + 1, tensors, {}, "key")
    returned = time.perf_counter() - began
    saver.wait_for_copy()
    copied = time.perf_counter() - began
    saver.wait()
    return {
        "bytes": total, "bytes_per_s": found, "begin_s": returned, "copied_s": copied, "committed_s": time.perf_counter() - began,
    }  # fmt: skip


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("checkpoint-bench"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from tests.ranks import run_ranks

    directory = options.directory.absolute()
    directory.mkdir(parents=True)
    try:
        size = int(options.gigabytes * 2**30)
        found = run_ranks(measure, options.ranks, directory, size, options.rounds)[0]
    finally:
        shutil.rmtree(directory)
    speed = {name: statistics.median(values) / 1e6 for name, values in found["bytes_per_s"].items()}
    result = {
        "what": "Checkpoints.save (plan, serialise, sha256, fsync, manifest, rename) against dd bs=16M conv=fsync, alternating",
        "ranks": options.ranks,
        "GB": round(found["bytes"] / 1e9, 3),
        "dd_MB_per_s": [round(value / 1e6) for value in found["bytes_per_s"]["dd"]],
        "save_MB_per_s": [round(value / 1e6) for value in found["bytes_per_s"]["save"]],
        "save_over_dd_of_medians": round(speed["save"] / speed["dd"], 3),
        "async": {name: round(found[name], 3) for name in ("begin_s", "copied_s", "committed_s")},
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
