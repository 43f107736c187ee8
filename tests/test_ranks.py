"""The helper itself: results by rank, and a failing rank that neither hides nor hangs the others."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def total(rank: int, offset: int) -> int:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return int(value) * 10 + rank


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_results_come_back_by_rank() -> None:
    assert run_ranks(total, 2, 3) == [70, 71]


def test_a_failing_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match="the reason"):
        run_ranks(fails_on_one, 2)
