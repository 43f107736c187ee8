"""How many ranks and threads this host has room for, found without importing torch."""

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rl_core.config.trainer import LaunchConfig

NVIDIA = Path("/proc/driver/nvidia/gpus")


def rank_count(launch: LaunchConfig) -> int:
    """`launch.nproc_per_node`, else one rank per GPU, else one."""
    return launch.nproc_per_node or max(1, 0 if launch.device == "cpu" else gpu_count())


def threads_per_rank(launch: LaunchConfig) -> int:
    """`launch.threads_per_rank`, else `OMP_NUM_THREADS` where set, else the usable cores shared out evenly."""
    if launch.threads_per_rank is not None:
        return launch.threads_per_rank
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdigit() and int(stated) else max(1, len(os.sched_getaffinity(0)) // rank_count(launch))


def device_kind(launch: LaunchConfig) -> str:
    """`cuda` or `cpu`, as the ranks will choose it."""
    return "cpu" if launch.device == "cpu" or (launch.device == "auto" and not gpu_count()) else "cuda"


def gpu_count(environment: Mapping[str, str] = os.environ, driver: Path = NVIDIA) -> int:
    """NVIDIA GPUs that CUDA will show: those of the host, limited by `CUDA_VISIBLE_DEVICES`.

    CUDA takes the identifiers up to the first that it does not know.
    """
    present = _present(driver)
    stated = environment.get("CUDA_VISIBLE_DEVICES")
    if stated is None:
        return present
    count = 0
    for identifier in (part.strip() for part in stated.split(",")):
        known = int(identifier) < present if identifier.isdigit() else identifier.startswith(("GPU-", "MIG-"))
        if not known:
            break
        count += 1
    return count if present else 0


@functools.cache
def _present(driver: Path) -> int:
    """In a container the tool shows its share of the host's GPUs; /proc may show all of them."""
    if shutil.which("nvidia-smi") is not None:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return sum(1 for _ in driver.iterdir()) if driver.is_dir() else 0
