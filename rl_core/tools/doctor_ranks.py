"""Whether processes of this host find each other and exchange data, tried with as many of them as a training would start.

Run as a program, this file is one of them: `python -m rl_core.tools.doctor_ranks BACKEND SECONDS`.
"""

from rl_core.process import PARENT, die_with_parent

if __name__ == "__main__":
    die_with_parent()

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Literal

from rl_core.errors import EXIT_DONE, LaunchError
from rl_core.tools.doctor import Check, own_path, refused

PORT = 29500
"""torchrun's."""
SECONDS = 60.0
ERROR = "ppoflow: error: "


def check_collective(backend: Literal["gloo", "nccl"], ranks: int, port: int, seconds: float = SECONDS) -> Check:
    """An all-reduce of `ranks` processes that meet at a port of this host, each on a GPU of its own with nccl.

    Args:
        port: 0 takes a free one.
        seconds: for them to meet and be through, each; starting takes some more.
    """
    port = port or _free_port()
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(ranks)]
        running = [_start(backend, rank, ranks, port, seconds, output) for rank, output in enumerate(outputs)]
        try:
            ended = _wait(running, time.monotonic() + 2 * seconds)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if ended and all(process.returncode == EXIT_DONE for process in running):
            return Check(backend, "pass", f"an all-reduce of {ranks} process(es) that met at port {port}")
        said = [_said(output) for output in outputs]
    failed = next((text for process, text in zip(running, said, strict=True) if process.returncode > 0), "")
    error = next((text for text in [failed, *said] if text), f"{ranks} processes were not through within {2 * seconds:.0f} s")
    hint = "export NCCL_DEBUG=INFO shows what it tries; TORCH_DISTRIBUTED_BACKEND=gloo does without it."
    return refused(backend, LaunchError(error), hint if backend == "nccl" else "See the words of the error.")


def main(arguments: Sequence[str]) -> None:
    """One process: join, add up the ranks."""
    import torch

    from rl_core.config.trainer import LaunchConfig
    from rl_core.distributed import joined

    backend, seconds = arguments
    device: Literal["cpu", "cuda"] = "cuda" if backend == "nccl" else "cpu"
    chosen: Literal["nccl", "gloo"] = "nccl" if backend == "nccl" else "gloo"
    with joined(LaunchConfig(device=device, dist_backend=chosen, preflight_timeout_s=float(seconds))) as world:
        total = int(world.sum(torch.tensor(world.rank + 1.0)))
        if total != world.size * (world.size + 1) // 2:
            raise LaunchError(f"The sum over {world.size} ranks came out as {total}. Another network interface may help.")


def _start(backend: str, rank: int, ranks: int, port: int, seconds: float, output: IO[str]) -> "subprocess.Popen[bytes]":
    """As torchrun would, but rank 0 serves the meeting itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    own = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", PARENT: str(os.getpid()),
    }  # fmt: skip
    command = [sys.executable, "-m", "rl_core.tools.doctor_ranks", backend, str(seconds)]
    return subprocess.Popen(
        command, env=inherited | own_path() | own, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )


def _wait(running: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> bool:
    """Until all have ended or one has failed; False: the time was over first."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        if None not in codes or any(codes):
            return True
        time.sleep(0.05)
    return False


def _said(output: IO[str]) -> str:
    """A process's message for the user, else its last line."""
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    told = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return (told or lines or [""])[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    from rl_core.entry import run_program

    run_program(main)
