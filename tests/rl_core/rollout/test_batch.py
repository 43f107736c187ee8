import pytest
import torch

from rl_core.rollout.batch import RolloutBatch


def batch() -> RolloutBatch:
    return RolloutBatch.from_lists(
        prompts=[[5, 6], [7], [8, 9, 10]],
        responses=[[11, 1], [], [12, 13, 14]],
        logprobs=[[-0.5, -0.25], [], [-1.0, -2.0, -3.0]],
        truncated=[False, False, True],
        sample_index=[4, 2, 9],
    )


def rows(of: RolloutBatch) -> list[tuple]:
    """What a row means, without its padding."""
    return [
        (
            of.input_ids[i, : of.prompt_length[i]].tolist(), of.responses[i], of.logprobs[i, : of.response_length[i]].tolist(),
            of.truncated[i].item(), of.sample_index[i].item(),
        )
        for i in range(len(of))
    ]  # fmt: skip


def test_layout():
    made = batch()
    assert made.input_ids.tolist() == [[5, 6, 11, 1, 0, 0], [7, 0, 0, 0, 0, 0], [8, 9, 10, 12, 13, 14]]
    assert made.prompt_length.tolist() == [2, 1, 3]
    assert made.response_length.tolist() == [2, 0, 3]
    assert made.width == 3
    assert made.mask.tolist() == [[True, True, False], [False, False, False], [True, True, True]]
    assert made.responses == [[11, 1], [], [12, 13, 14]]
    assert made.logprobs.tolist() == [[-0.5, -0.25, 0.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -3.0]]
    assert made.logprobs.dtype == torch.float32


@pytest.mark.parametrize("chosen", [[0, 1, 2], [2, 0], [1], [1, 1], []])
def test_select(chosen):
    made = batch().select(chosen)
    assert rows(made) == [rows(batch())[i] for i in chosen]
    assert made.width == max([1, *made.response_length.tolist()])
    assert made.input_ids.shape == (len(chosen), max([1, *(made.prompt_length + made.response_length).tolist()]))


def test_select_takes_a_tensor():
    assert rows(batch().select(torch.tensor([2, 1]))) == [rows(batch())[i] for i in (2, 1)]


def test_cat_pads_again_and_undoes_select():
    made = batch()
    again = RolloutBatch.cat([made.select([1]), made.select([0]), made.select([]), made.select([2])])
    assert rows(again) == [rows(made)[i] for i in (1, 0, 2)]
    assert torch.equal(again.select([1, 0, 2]).input_ids, made.input_ids)


def test_pad_rows_adds_rows_without_weight():
    made = batch().pad_rows(5)
    assert len(made) == 5
    assert rows(made)[:3] == rows(batch())
    assert made.prompt_length[3:].tolist() == [1, 1]
    assert made.response_length[3:].tolist() == [0, 0]
    assert made.sample_index[3:].tolist() == [-1, -1]
    assert not made.mask[3:].any()
    assert rows(batch().pad_rows(3)) == rows(batch())


def test_a_rank_without_rows_pads_too():
    empty = RolloutBatch.from_lists([], [], [], [], [])
    assert len(empty) == 0
    assert empty.width == 1
    assert empty.mask.shape == (0, 1)
    assert empty.responses == []
    assert len(empty.pad_rows(2)) == 2
