"""Any number of ranks reads what any other number wrote, whatever the shapes: one to four, fewer rows than ranks, other
dimensions sharded, replicas."""

from pathlib import Path

import torch
import torch.distributed as dist

from rl_core.checkpoint.dcp import load_tensors, save_tensors
from tests.ranks import run_ranks

SIZES = (1, 2, 3, 4)
LAYOUTS = ("rows", "columns", "replicas")


def whole() -> dict[str, torch.Tensor]:
    """Rows that divide by no number of ranks, fewer rows than ranks, one row, a number, another type."""
    generator = torch.Generator().manual_seed(0)
    return {
        "seven": torch.rand(7, 5, generator=generator), "three": torch.rand(3, 4, generator=generator),
        "one": torch.rand(1, 9, generator=generator), "half": torch.rand(6, 2, generator=generator).bfloat16(),
        "number": torch.tensor(5.0),
    }  # fmt: skip


def placed(tensors: dict[str, torch.Tensor], size: int, layout: str) -> dict[str, torch.Tensor]:
    """On the first `size` ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}[layout]
    mesh = DeviceMesh("cpu", list(range(size)))
    return {name: distribute_tensor(tensor, mesh, [placement]) if tensor.dim() else tensor for name, tensor in tensors.items()}


def every_pair(rank: int, directory: Path) -> list[str]:
    """Which pairs do not agree."""
    wrong = []
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    for size in SIZES:
        for layout in LAYOUTS:
            tensors = placed(whole(), size, layout)  # making a mesh is for all ranks
            if rank < size:
                save_tensors(tensors, directory / f"{size} {layout}", groups[size])
            dist.barrier()
    for reading in SIZES:
        for layout in LAYOUTS:
            target = placed({name: torch.zeros_like(tensor) for name, tensor in whole().items()}, reading, layout)
            for written in directory.iterdir():
                if rank >= reading:
                    continue
                for tensor in target.values():
                    (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()
                load_tensors(target, written, process_group=groups[reading])
                for name, tensor in target.items():
                    read = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    if not torch.equal(read, whole()[name]):
                        wrong.append(f"{name} of {written.name} on {reading} {layout}")
            dist.barrier()
    return wrong


def test_every_number_of_ranks_reads_every_other(tmp_path: Path) -> None:
    assert run_ranks(every_pair, 4, tmp_path) == [[]] * 4
    assert len(list(tmp_path.iterdir())) == len(SIZES) * len(LAYOUTS)
