"""Order and cursor of the prompts."""

import pytest

from rl_core.data.prompts import Prompts
from rl_core.data.shards import Blocks
from rl_core.errors import DataError


def row(index):
    return {
        "prompt_id": f"{index:064x}", "input_ids": [index, 1], "text": f"<{index}>", "question": str(index),
        "ground_truth": None if index % 2 else "1", "data_source": "d", "extra_info": '{"a": {"__tuple__": [1, 2]}}',
    }  # fmt: skip


@pytest.fixture
def prompts(tmp_path):
    blocks = Blocks(tmp_path, "plan")
    blocks.write(0, {"train": [row(i) for i in range(6)], "eval": []}, {})
    blocks.write(1, {"train": [row(i) for i in range(6, 10)], "eval": []}, {})
    return Prompts(tmp_path, "train")


def test_rows_over_several_shards(prompts):
    assert len(prompts) == 10
    assert [prompts[i].input_ids for i in range(10)] == [[i, 1] for i in range(10)]
    assert prompts[7].extra_info == {"a": (1, 2)}
    assert (prompts[6].ground_truth, prompts[7].ground_truth) == ("1", None)
    with pytest.raises(IndexError):
        prompts[10]


def test_order_is_a_permutation_of_seed_and_epoch(prompts):
    orders = {(seed, epoch): prompts.order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(10)) for order in orders.values())
    assert len(set(map(tuple, orders.values()))) == 9
    assert prompts.order(1, 2) == orders[1, 2]


def test_order_never_changes(prompts):
    """Worked out once in plain Python integers: sort keys are SplitMix64 from the first 8 bytes of sha256("7:3")."""
    import hashlib

    state, keys = int.from_bytes(hashlib.sha256(b"7:3").digest()[:8], "little"), []
    for _ in range(10):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        keys.append(z ^ (z >> 31))
    assert prompts.order(7, 3) == sorted(range(10), key=keys.__getitem__) == ORDER_7_3


ORDER_7_3 = [1, 8, 5, 6, 2, 0, 9, 7, 3, 4]


@pytest.mark.parametrize("count", [1, 3, 4, 10, 25])
def test_take_walks_the_epochs_without_skip_or_repeat(prompts, count):
    """Whatever the step size, the cursor reads epoch after epoch."""
    expected = [f"{i:064x}" for epoch in range(5) for i in prompts.order(5, epoch)]
    taken = [prompt.prompt_id for offset in range(0, 50, count) for prompt in prompts.take(5, offset, count)]
    assert taken[:50] == expected


def test_no_shards(tmp_path):
    with pytest.raises(DataError, match="no eval prompts"):
        Prompts(tmp_path, "eval")
