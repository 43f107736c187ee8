"""Batch plans: a mini-batch holds the same responses on any number of ranks, and all ranks have equally many micro-batches."""

import pytest
import torch

from rl_core.batching import BatchPlan
from rl_core.experience import Experience
from rl_core.rollout.batch import RolloutBatch

LENGTHS = [3, 0, 2, 1, 9, 4, 4]


def plan(responses: int, mini_batch: int, micro_batch: int = 2, tokens: int | None = None, ppo_epochs: int = 1) -> BatchPlan:
    return BatchPlan(responses, responses, mini_batch, micro_batch, tokens, ppo_epochs)


def batch(lengths: list[int] = LENGTHS) -> RolloutBatch:
    return RolloutBatch.from_lists(
        prompts=[[5]] * len(lengths),
        responses=[[7] * length for length in lengths],
        logprobs=[[-1.0] * length for length in lengths],
        truncated=[False] * len(lengths),
        sample_index=list(range(len(lengths))),
    )


@pytest.mark.parametrize("tokens", [None, 1, 6, 1000])
@pytest.mark.parametrize("micro", [1, 2, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 9])
def test_each_row_is_computed_once_in_equally_many_micro_batches_on_all_ranks(parts, micro, tokens):
    p = plan(7, 7, micro, tokens)
    portions = [p.portions(batch(), parts, part) for part in range(parts)]
    assert len({len(cut) for cut in portions}) == 1
    assert sorted(row for cut in portions for rows in cut for row in rows.tolist()) == list(range(7))
    for rows in (rows for cut in portions for rows in cut if len(rows)):
        widest = max(LENGTHS[row] + 1 for row in rows)
        assert len(rows) <= micro if tokens is None else len(rows) == 1 or widest * len(rows) <= tokens


def test_long_rows_come_first_and_are_spread_over_the_ranks():
    assert [rows.tolist() for rows in plan(7, 7, 3).portions(batch(), 1, 0)] == [[4, 5, 6], [0, 2, 3], [1]]
    assert [rows.tolist() for rows in plan(7, 7, 3).portions(batch(), 2, 0)] == [[4, 6, 2], [1]]
    assert [rows.tolist() for rows in plan(7, 7, 3).portions(batch(), 2, 1)] == [[5, 0, 3], []]


def test_a_token_budget_counts_the_padding():
    portions = plan(7, 7, tokens=10).portions(batch(), 1, 0)
    assert [rows.tolist() for rows in portions] == [[4], [5, 6], [0, 2], [3, 1]]


def test_experience_is_cut_into_mini_and_micro_batches_with_its_rows_together():
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    whole = Experience(batch=batch([3, 0, 2, 1]), logprobs=rows, ref_logprobs=None, values=rows, advantages=rows, returns=rows)
    minis = list(whole.mini_batches(plan(4, 2, ppo_epochs=2)))
    assert [mini.batch.sample_index.tolist() for mini in minis] == [[0, 1], [2, 3]] * 2
    assert [mini.values.shape[1] for mini in minis] == [3, 2, 3, 2]
    for portion in plan(2, 2, 1).portions(minis[1].batch, 1, 0):
        micro = minis[1].select(portion)
        assert micro.values[0, 0] == micro.batch.sample_index[0]
        assert micro.ref_logprobs is None


def test_a_micro_batch_without_rows_has_one_of_no_weight():
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    whole = Experience(batch=batch([3, 0, 2, 1]), logprobs=rows, ref_logprobs=rows, values=rows, advantages=rows, returns=rows)
    micro = whole.select(torch.tensor([], dtype=torch.long))
    assert len(micro.batch) == 1
    assert not micro.batch.mask.any()
    assert micro.batch.prompt_length.tolist() == [1]
    assert micro.ref_logprobs is not None
    assert micro.ref_logprobs.shape == micro.values.shape == (1, micro.batch.width)


def test_the_plan_in_words():
    assert (
        plan(8, 4, 3, ppo_epochs=2)
        .describe(2)
        .endswith(
            "8 responses a step; 2 mini-batch(es) of 4 responses × 2 epoch(s) = 4 optimizer step(s); on each of 2 data-parallel "
            "rank(s) 2 responses a mini-batch in 1 micro-batch(es) of 2"
        )
    )
    assert plan(8, 4, tokens=99).describe(1).endswith("in micro-batches of at most 99 tokens")
