import math

import pytest
import torch

from rl_core.algorithms import masked_sum, whiten

VALUES = torch.tensor([[1.0, 2.0, math.nan], [math.inf, 6.0, 3.0], [math.nan, math.nan, math.nan]])
MASK = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])


def test_sum_sees_only_the_mask():
    assert masked_sum(VALUES, MASK) == 12.0
    assert masked_sum(VALUES, torch.zeros_like(MASK)) == 0.0


def test_whiten_by_hand():
    # 1, 2, 6, 3: mean 3, squared deviations 4 + 1 + 9 + 0 = 14, unbiased variance 14 / 3.
    scale = math.sqrt(14 / 3)
    expected = torch.tensor([[-2 / scale, -1 / scale, 0], [0, 3 / scale, 0], [0, 0, 0]])
    assert torch.allclose(whiten(VALUES, MASK), expected, atol=1e-6)


@pytest.mark.parametrize("kept", [0, 1])
def test_whiten_is_skipped_below_two_tokens(kept):
    mask = torch.zeros_like(MASK)
    mask[0, :kept] = True
    expected = torch.zeros_like(VALUES)
    expected[0, :kept] = VALUES[0, :kept]
    assert torch.equal(whiten(VALUES, mask), expected)


def test_whiten_of_equal_values_is_zero():
    assert torch.equal(whiten(torch.full((2, 3), 7.0), torch.ones(2, 3, dtype=torch.bool)), torch.zeros(2, 3))


def test_whiten_keeps_its_digits_beside_a_large_mean():
    values = torch.tensor([[4096.0, 4096.5, 4097.0]])
    assert torch.allclose(whiten(values, torch.ones(1, 3, dtype=torch.bool)), torch.tensor([[-1.0, 0.0, 1.0]]), atol=1e-6)
