"""What fails on one rank fails on all, in the same way."""

import torch.distributed as dist

from rl_core.errors import PpoflowError, RewardError
from rl_core.together import together
from tests.ranks import run_ranks


def fail_on_one(rank: int, error: Exception) -> tuple[str, str]:
    def action() -> str:
        if rank == 1:
            raise error
        return "fine"

    try:
        return "", together(action)
    except (PpoflowError, ValueError) as raised:
        dist.barrier()  # nobody is left behind in another collective
        return type(raised).__name__, str(raised)


def test_an_error_for_users_is_the_same_on_all_ranks():
    assert run_ranks(fail_on_one, 2, RewardError("mend it")) == [("RewardError", "mend it")] * 2


def fail_in_a_group(rank: int) -> tuple[str, str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return "", "fine"

    def action() -> None:
        if rank == 2:
            raise ValueError("odd")

    try:
        together(action, group)
    except (PpoflowError, ValueError) as raised:
        return type(raised).__name__, str(raised)
    raise AssertionError


def test_a_crash_stays_one_and_names_its_rank_whatever_its_place_in_the_group():
    assert run_ranks(fail_in_a_group, 3) == [
        ("", "fine"),
        (PpoflowError.__name__, "rank 2 failed (ValueError: odd)."),
        ("ValueError", "odd"),
    ]


def own_result(rank: int) -> int:
    return together(lambda: rank)


def test_results_are_each_ranks_own():
    assert run_ranks(own_result, 2) == [0, 1]
    assert together(lambda: 7) == 7
