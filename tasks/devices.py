"""How many ranks and threads this host has room for, found without importing torch.

`python -m tasks.devices` prints the number of ranks, for the scripts in `infra/slurm/`.
"""

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_core.config.trainer import LaunchConfig
from rl_core.errors import ConfigError

NVIDIA = Path("/proc/driver/nvidia/gpus")


def rank_count(launch: LaunchConfig) -> int:
    """`launch.nproc_per_node`, else one rank per GPU, else one.

    Raises:
        ConfigError: as `gpu_count`.
    """
    return launch.nproc_per_node or max(1, 0 if launch.device == "cpu" else gpu_count())


def threads_per_rank(launch: LaunchConfig) -> int:
    """`launch.threads_per_rank`, else `OMP_NUM_THREADS` where set, else the usable cores shared out evenly."""
    if launch.threads_per_rank is not None:
        return launch.threads_per_rank
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdigit() and int(stated) else max(1, len(os.sched_getaffinity(0)) // rank_count(launch))


def check_device(launch: LaunchConfig) -> None:
    """Refuse `launch.device: cuda` on a machine without GPU now, not after minutes of preparing.

    Raises:
        ConfigError: torch sees no GPU.
    """
    if launch.device == "cuda" and not gpu_count():
        import torch  # asked only here: it knows GPUs that nvidia-smi does not

        if not torch.cuda.is_available():
            raise ConfigError("launch.device = cuda, but torch sees no GPU on this machine. Use launch.device = auto or cpu.")


def device_kind(launch: LaunchConfig) -> str:
    """`cuda` or `cpu`, as the ranks will choose it."""
    return "cpu" if launch.device == "cpu" or (launch.device == "auto" and not gpu_count()) else "cuda"


def gpu_count(environment: Mapping[str, str] = os.environ, driver: Path = NVIDIA) -> int:
    """NVIDIA GPUs of this host that a rank each may have: those that CUDA will show, and no more than the batch job has.

    Raises:
        ConfigError: CUDA would show other GPUs than the job has, or none of them; it says what to export.
    """
    present, share = _present(driver), share_of_job(environment)
    stated = environment.get("CUDA_VISIBLE_DEVICES")
    if not present:
        return 0
    if stated is None:
        if share is None:
            return present
        if share.identifiers and present > share.count and share.identifiers != tuple(map(str, range(share.count))):
            wanted = ",".join(share.identifiers)
            raise ConfigError(
                f"{share.variable} gives this job {share.count} of the {present} GPUs that this host shows, but "
                f"CUDA_VISIBLE_DEVICES is not set, so the ranks would take the first. export CUDA_VISIBLE_DEVICES={wanted}"
            )
        return min(present, share.count)
    if not stated.strip() and share is not None and share.count:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is empty, which hides the {share.count} GPU(s) that {share.variable} gives this job. Unset it "
            "(SLURM and PBS set it themselves; SLURM_STEP_GPUS exists only inside srun), or set launch.device: cpu."
        )
    visible = _visible(stated, present)
    return visible if share is None else min(visible, share.count)


@dataclass(frozen=True)
class Share:
    """What a batch system says of a job's GPUs on this host."""

    variable: str
    count: int
    identifiers: tuple[str, ...] = ()
    """Their numbers on the host, where it tells them."""


def share_of_job(environment: Mapping[str, str], host: str | None = None) -> Share | None:
    """The GPUs that SLURM or PBS gives to this job (or srun's step) on this host; None where they say nothing.

    The number of tasks (`SLURM_NTASKS`) is never taken for it. From the narrower to the wider statement:
    `SLURM_STEP_GPUS`, `SLURM_GPUS_ON_NODE`, `SLURM_JOB_GPUS`, `SLURM_GPUS_PER_NODE` (sbatch(1), srun(1)), `PBS_GPUFILE`
    (Torque: a line HOST-gpuN for each), `PBS_NGPUS`. Where the last counts the GPUs of several hosts, `gpu_count` still takes no
    more than there are.

    Args:
        host: default: this one.

    Raises:
        ConfigError: a value that is none of the forms that these programs write.
    """
    for variable in (
        "SLURM_STEP_GPUS",
        "SLURM_GPUS_ON_NODE",
        "SLURM_JOB_GPUS",
        "SLURM_GPUS_PER_NODE",
        "PBS_GPUFILE",
        "PBS_NGPUS",
    ):
        value = environment.get(variable, "").strip()
        if not value:
            continue
        if variable == "PBS_GPUFILE":
            identifiers = _listed_in(Path(value), host or socket.gethostname())
            if not identifiers:  # it knows this host by another name
                continue
            return Share(variable, len(identifiers), identifiers)
        if variable in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
            return _listed(variable, value)
        return Share(variable, sum(_number(variable, value, part) for part in _parts(variable, value)))
    return None


def _listed(variable: str, value: str) -> Share:
    """Identifiers (`0,1`, `0-3`, `GPU-5a1c`), or a number of devices by type (`gpu:2`, `gpu:a100:4`)."""
    parts = _parts(variable, value)
    if any(":" in part for part in parts):
        return Share(variable, sum(_number(variable, value, part) for part in parts))
    identifiers: list[str] = []
    for part in parts:
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        identifiers += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]
    return Share(variable, len(identifiers), tuple(identifiers))


def _number(variable: str, value: str, part: str) -> int:
    """`4`, `a100:4`, `gpu:a100:4`."""
    number = re.fullmatch(r"(?:[^:]+:)*(\d+)", part)
    if number is None:
        raise ConfigError(f"{variable} = {value!r} is not a number of GPUs. State launch.nproc_per_node.")
    return int(number[1])


def _parts(variable: str, value: str) -> list[str]:
    parts = [part.strip() for part in value.split(",")]
    if any(re.search(r"\s", part) for part in parts):
        mended = ",".join(value.replace(",", " ").split())
        raise ConfigError(
            f"{variable} is {value!r}: blanks where commas belong, so that CUDA would see one GPU or none. Leave the commas in "
            f"(no sed 's/,/ /g'): export {variable}={mended}"
        )
    return parts


def _listed_in(file: Path, host: str) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(f"PBS_GPUFILE = {file} cannot be read ({error.strerror}). State launch.nproc_per_node.") from None
    entries = [match.groups() for line in lines if (match := re.fullmatch(r"(.+)-gpu(\d+)", line))]
    return tuple(number for name, number in entries if name.partition(".")[0] == host.partition(".")[0])


def _visible(stated: str, present: int) -> int:
    """CUDA takes the identifiers up to the first that it does not know."""
    count = 0
    for identifier in _parts("CUDA_VISIBLE_DEVICES", stated):
        known = int(identifier) < present if identifier.isdigit() else identifier.startswith(("GPU-", "MIG-"))
        if not known:
            break
        count += 1
    return count


@functools.cache
def _present(driver: Path) -> int:
    """In a container the tool shows its share of the host's GPUs; /proc may show all of them."""
    if shutil.which("nvidia-smi") is not None:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return sum(1 for _ in driver.iterdir()) if driver.is_dir() else 0


if __name__ == "__main__":
    try:
        print(rank_count(LaunchConfig()))
    except ConfigError as mistake:
        sys.exit(f"ppoflow: error: {mistake}")
