"""What computes: the host, its GPUs, and the types that they know.

Run as a program, it prints what torch sees: `python -m rl_core.tools.doctor_devices`. CUDA is started only there, since a process
holds memory on each GPU that it has used, and some GPUs let no second process in.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_core.tools.doctor import Check, own_path

BFLOAT16 = (8, 0)
"""The compute capability from which NVIDIA's GPUs have bfloat16."""
LITTLE_SHM = 2**30
"""Bytes of shared memory with which NCCL may not start; a container has 64 MiB by default."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""
    error: str = ""
    """Of a first addition on it."""


def gpus_of_torch() -> list[Gpu]:
    """The GPUs that torch sees, each tried with an addition in a process of its own; where that dies, one with its last line."""
    import torch

    if not torch.cuda.device_count():
        return []
    command = [sys.executable, "-m", "rl_core.tools.doctor_devices"]
    ended = subprocess.run(command, env=os.environ | own_path(), capture_output=True, text=True, check=False)
    if ended.returncode:
        return [Gpu("GPU", (0, 0), 0, (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1][:300])]
    return [Gpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in json.loads(ended.stdout)]


def check_gpus(present: int, seen: Sequence[Gpu], cuda: str | None) -> Check:
    """The GPUs of the host can be computed on.

    Args:
        present: GPUs that the driver shows.
        seen: those that torch sees.
        cuda: the version of CUDA that torch was built with; None: none.
    """
    if broken := [f"{gpu.name}: {gpu.error}" for gpu in seen if gpu.error]:
        remedy = "Take a torch that was built for this GPU (https://pytorch.org/get-started/locally), and a driver for it."
        return Check("gpus", "fail", "; ".join(broken), remedy)
    if seen:
        kinds = [f"{gpu.name} ({gpu.memory / 1e9:.0f} GB)" for gpu in seen]
        return Check("gpus", "pass", ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)))
    if not present:
        return Check("gpus", "warn", "none: the CPU computes", "Good for trials. Train on a machine with NVIDIA GPUs.")
    if cuda is None:
        found = f"the driver shows {present}, but this torch was built without CUDA"
        return Check("gpus", "fail", found, "Install torch with CUDA: https://pytorch.org/get-started/locally")
    found = f"the driver shows {present}, but torch, built with CUDA {cuda}, sees none"
    remedy = (
        f"Compare with the CUDA version in the head of nvidia-smi: a driver older than {cuda} needs a torch built with an older "
        "CUDA. In a container the GPUs must be passed in (--gpus all)."
    )
    return Check("gpus", "fail", found, remedy)


def check_bfloat16(gpus: Sequence[Gpu]) -> Check:
    """The device computes in bfloat16."""
    if not gpus:
        return Check("bfloat16", "pass", "on the CPU, slower than float32 where it has no instructions for it")
    lacking = {f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})": gpu.capability for gpu in gpus}
    lacking = {name: capability for name, capability in lacking.items() if capability < BFLOAT16}
    if lacking:
        found = f"not on {', '.join(lacking)}: models in bfloat16 compute in float16 instead"
        remedy = (
            "Set model.torch_dtype to float16 (trained with loss scaling) or float32, or take GPUs from compute capability 8.0."
        )
        return Check("bfloat16", "warn", found, remedy)
    return Check("bfloat16", "pass", "on every GPU")


def check_host(gpus: int, cores: int | None = None, memory: int | None = None, shared: int | None = None) -> Check:
    """Cores, memory and shared memory; sizes in bytes, default: this host's."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory
    if shared is None:
        shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    found = f"{cores} cores, {memory / 2**30:.1f} GiB of memory"
    if gpus > 1 and shared < LITTLE_SHM:
        remedy = "Start the container with --ipc=host or --shm-size=8g, or export NCCL_SHM_DISABLE=1 (slower)."
        return Check("host", "warn", f"{found}, but only {shared / 2**20:.0f} MiB in /dev/shm, which NCCL uses", remedy)
    return Check("host", "pass", found)


def _tried() -> list[Gpu]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties, error = torch.cuda.get_device_properties(index), ""
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
        except RuntimeError as failed:
            error = " ".join(str(failed).split())[:200]
        found.append(Gpu(properties.name, (properties.major, properties.minor), properties.total_memory, error))
    return found


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in _tried()]))
