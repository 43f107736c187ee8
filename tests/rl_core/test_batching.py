"""Batch plans: on any number of ranks the same responses are in a mini-batch, and all ranks have equally many rows."""

import pytest
import torch

from rl_core.batching import BatchPlan, Experience, by_length
from rl_core.rollout.batch import RolloutBatch


def plan(responses: int, mini_batch: int, ranks: int, micro_batch: int = 2, ppo_epochs: int = 1) -> BatchPlan:
    return BatchPlan(responses, responses, mini_batch, micro_batch, ppo_epochs, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("responses", "mini_batch"), [(8, 8), (8, 4), (12, 3), (6, 1), (5, 5)])
def test_each_response_is_computed_once_and_in_its_mini_batch(responses, mini_batch, ranks):
    p = plan(responses, mini_batch, ranks)
    assert p.mini_batches * mini_batch == responses
    for mini in range(p.mini_batches):
        parts = [p.samples_of(rank, mini) for rank in range(ranks)]
        assert [number for part in parts for number in part] == list(range(mini * mini_batch, (mini + 1) * mini_batch))
        assert max(map(len, parts)) <= p.rows


def batch() -> RolloutBatch:
    lengths = [3, 0, 2, 1]
    return RolloutBatch.from_lists(
        prompts=[[5]] * 4,
        responses=[[7] * length for length in lengths],
        logprobs=[[-1.0] * length for length in lengths],
        truncated=[False] * 4,
        sample_index=[0, 1, 2, 3],
    )


def test_portions_hold_every_row_once_longest_first():
    assert [rows.tolist() for rows in by_length(batch(), 3)] == [[0, 2, 3], [1]]


def test_experience_is_cut_into_mini_and_micro_batches_with_its_rows_together():
    rows = torch.arange(4.0)[:, None].expand(4, 3)
    whole = Experience(batch=batch(), logprobs=rows, ref_logprobs=None, values=rows, advantages=rows, returns=rows)
    minis = list(whole.mini_batches(plan(4, 2, ranks=1, ppo_epochs=2)))
    assert [mini.batch.sample_index.tolist() for mini in minis] == [[0, 1], [2, 3]] * 2
    assert [mini.values.shape[1] for mini in minis] == [3, 2, 3, 2]
    for micro in minis[1].micro_batches(1):
        assert micro.values[0, 0] == micro.batch.sample_index[0]
        assert micro.ref_logprobs is None
