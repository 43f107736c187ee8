"""Runs a function of a test file on several real processes joined by gloo."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 240.0
PRELOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo",
    "torch.utils.checkpoint", "torch.testing", "transformers.models.llama.modeling_llama", "transformers.generation.utils",
    "tokenizers", "pytest", "rl_core.train",
]  # fmt: skip


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` processes of their own with torch.distributed (gloo) initialised.

    They are forked from a process that has done nothing but import torch and transformers, which takes seconds each time.

    The function must be importable (module level); arguments and results must be picklable.

    Returns:
        What each rank returned, by rank.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died or did not end in time. The other ranks are
            ended then, so that one failing rank hangs nobody.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        ranks = started(function, world_size, Path(scratch), *args)
        try:
            _wait(ranks, Path(scratch))
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                rank.join()
        return [pickle.loads((Path(scratch) / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def started(function: Callable[..., Any], world_size: int, scratch: Path, *args: Any) -> list[Any]:
    """The processes that run it, by rank: what each returns or raises goes to files in `scratch`."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [
        context.Process(target=_rank, args=(function, rank, world_size, str(scratch), dict(os.environ), args), daemon=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _wait(ranks: list[Any], scratch: Path) -> None:
    """Return when all ranks have ended well; raise at the first that has not."""
    from multiprocessing.connection import wait

    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), timeout=LIMIT_SECONDS)
        if not ended:
            raise RuntimeError(f"ranks {sorted(running.values())} did not end within {LIMIT_SECONDS} s")
        for sentinel in ended:
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode != 0:
                reports = "\n".join(path.read_text() for path in sorted(scratch.glob("*.error")))
                raise RuntimeError(f"rank {rank} failed with exit code {ranks[rank].exitcode}:\n{reports}")


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, scratch: str, environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.clear()  # what the server had when it started
    os.environ.update(environment)
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
        result = function(rank, *args)
        Path(scratch, f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        Path(scratch, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    dist.destroy_process_group()
