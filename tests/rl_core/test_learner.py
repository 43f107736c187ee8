"""A learner's rate is a function of the step; gradients that are not finite are not applied; float16 has its loss scaled."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from rl_core.config.trainer import LaunchConfig
from rl_core.distributed import joined
from rl_core.errors import NonFiniteError
from rl_core.groups import make_groups
from rl_core.learner import FIRST_SCALE, MOST_SKIPPED, Learner
from tests.rl_core.models.cases import config

Make = Callable[..., Learner]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an actor of two weights on one rank."""
    with joined(LaunchConfig(device="cpu")) as world:

        def learner(steps: int = 10, **sections: Any) -> Learner:
            settings = config(**sections)
            module = nn.Linear(2, 1, bias=False)
            nn.init.constant_(module.weight, 1.0)
            group = make_groups(settings, ["actor", "critic", "ref"], "cpu")["actor"]
            fully_shard(module, mesh=group.mesh)
            return Learner("actor", module, group, settings, world.device, steps)

        yield learner


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [2.0] * 10),
        ({"warmup_steps": 4}, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ({"lr_scheduler_type": "linear"}, [2 * (1 - step / 9) for step in range(10)]),
        (
            {"lr_scheduler_type": "linear", "warmup_steps": 5, "min_lr_ratio": 0.5},
            [0.4, 0.8, 1.2, 1.6, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0],
        ),
        ({"lr_scheduler_type": "cosine"}, [1 + math.cos(math.pi * step / 9) for step in range(10)]),
        (
            {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1},
            [0.2 + 0.9 * (1 + math.cos(math.pi * step / 9)) for step in range(10)],
        ),
    ],
)  # fmt: skip
def test_the_learning_rate_is_a_function_of_the_step(make: Make, settings: dict[str, Any], expected: list[float]) -> None:
    learner = make(actor={"learning_rate": 2.0, **settings})
    assert [learner.learning_rate(step) for step in range(10)] == pytest.approx(expected)
    assert learner.learning_rate(30) == pytest.approx(expected[-1])


def loss(learner: Learner, factor: float) -> torch.Tensor:
    return learner.module(torch.tensor([[3.0, 4.0]])).sum() * factor


def test_gradients_are_clipped_to_the_norm_and_the_norm_is_that_before(make: Make) -> None:
    learner = make(actor={"learning_rate": 1.0, "adam_epsilon": 1e6, "max_grad_norm": 2.5})
    learner.backward(loss(learner, 2.0), last=True)
    assert learner.step(0)["grad_norm"] == pytest.approx(10.0)
    # AdamW's first step is lr · g / (|g| + ε), here nearly g / ε, with g = (3, 4) · 2 · 2.5 / 10.
    moved = (1.0 - learner.module.weight.full_tensor()) * 1e6
    torch.testing.assert_close(moved, torch.tensor([[1.5, 2.0]]), rtol=0.2, atol=0)


def test_gradients_that_are_not_finite_are_not_applied_and_end_the_run_in_the_end(make: Make) -> None:
    learner = make(actor={"learning_rate": 1.0})
    for step in range(MOST_SKIPPED - 1):
        learner.backward(loss(learner, math.nan), last=True)
        assert learner.step(step) == {"lr": 1.0, "skipped": 1.0}
    assert learner.module.weight.full_tensor().tolist() == [[1.0, 1.0]]
    learner.backward(loss(learner, math.inf), last=True)
    with pytest.raises(NonFiniteError, match=r"actor were not finite 3 times in a row, first in weight"):
        learner.step(9)


def test_a_good_step_between_bad_ones_begins_the_count_again_and_the_count_is_saved(make: Make) -> None:
    learner = make()
    for factor in (math.nan, math.nan, 1.0, math.nan):
        learner.backward(loss(learner, factor), last=True)
        learner.step(0)
    assert learner.state == {"skipped": 1, "scale": None, "scaled_steps": 0}
    again = make()
    again.restore(learner.state)
    assert again.skipped == 1


def test_in_float16_the_loss_is_scaled_and_the_scale_falls_until_gradients_are_finite(make: Make) -> None:
    half, plain = make(model={"name_or_path": "x", "torch_dtype": "float16"}), make()
    assert (half.scale, plain.scale) == (FIRST_SCALE, None)
    half.backward(loss(half, 1e-3), last=True)
    assert half.module.weight.grad.full_tensor()[0].tolist() == pytest.approx([3e-3 * FIRST_SCALE, 4e-3 * FIRST_SCALE])
    assert half.step(0)["grad_norm"] == pytest.approx(5e-3)
    for _ in range(5):  # more often than MOST_SKIPPED: it is the scale that was too high
        half.backward(loss(half, 1e36), last=True)
        assert half.step(1)["skipped"] == 1.0
    assert half.scale == FIRST_SCALE / 2**5
    assert half.skipped == 0
    again = make(model={"name_or_path": "x", "torch_dtype": "float16"})
    again.restore(half.state)
    assert again.scale == half.scale
    again.restore(plain.state)  # of a run in float32: keeps its own
    assert again.scale == half.scale
