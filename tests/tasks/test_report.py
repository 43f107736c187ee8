import random
from pathlib import Path
from typing import Any

import pytest

from tasks.report import comparison, learning_curve, reward_histogram, samples, smoothed


def result(rewards: list[float], low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    mean = sum(rewards) / len(rewards)
    return {
        "reward": {"mean": mean, "std": 0.5, "ci95": [low, high]},
        "accuracy": {"mean": mean, "ci95": [low, high]},
        "kl": {"mean": 0.0123},
        "response_length": {"mean": 7.25, "max": 16},
        "truncated": 0.125,
        "prompts": len(rewards),
        "rewards": rewards,
    }


def pixels(path: Path) -> tuple[int, int, int]:
    """Width, height, number of colours."""
    from PIL import Image

    with Image.open(path) as image:
        return *image.size, len(image.convert("RGB").getcolors(1 << 24) or [])


def test_smoothed_is_the_mean_of_the_last_values() -> None:
    assert smoothed([1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert smoothed([4.0], 10) == [4.0]
    assert smoothed([], 3) == []


def test_comparison_shows_each_model_with_interval() -> None:
    lines = comparison({"base": result([0.0, 0.0], 0, 0.25), "policy": result([0.0, 1.0], 0.25, 0.75)}).splitlines()
    assert lines[0] == "|  | base | policy |"
    assert lines[2] == "| reward | 0.000 (0.000 to 0.250) | 0.500 (0.250 to 0.750) |"
    assert "| KL to the base model | 0.0123 | 0.0123 |" in lines
    assert "| cut off at the longest length | 12.5% | 12.5% |" in lines


def test_samples_stand_side_by_side_and_keep_their_text() -> None:
    base = [
        {"prompt_id": "a", "prompt": "<u>2*3|4_x?\nnow", "response": "`<b>`", "reward": 0.0, "ground_truth": "6"},
        {"prompt_id": "b", "prompt": "second", "response": "x", "reward": 0.5, "ground_truth": None},
    ]
    policy = [{**row, "response": "6" * 1000, "reward": 1.0} for row in reversed(base)]
    lines = samples({"base": base, "policy": policy}, count=1).splitlines()
    assert lines[2] == "| prompt | expected | base | policy |"
    assert len(lines) == 5, "one prompt asked for"
    assert lines[4].startswith(r"| &lt;u&gt;2\*3\|4\_x?<br>now | 6 | \`&lt;b&gt;\` **(0)** | 666")
    assert lines[4].endswith("6… **(1)** |")


@pytest.mark.parametrize("steps", [1, 4, 300])
def test_learning_curve_of_few_and_many_steps(tmp_path: Path, steps: int) -> None:
    draw = random.Random(0)
    metrics = [
        {"step": step, "critic/score/mean": draw.random(), "response_length/mean": 9.5, "actor/reference_kl": 0.01 * step}
        for step in range(1, steps + 1)
    ]
    learning_curve(metrics, tmp_path / "three.png")
    without_kl = [{name: value for name, value in row.items() if "kl" not in name} for row in metrics]
    learning_curve(without_kl, tmp_path / "two.png")
    width, height, colours = pixels(tmp_path / "three.png")
    assert width == 960
    assert height > pixels(tmp_path / "two.png")[1], "a panel for each curve that there is"
    assert colours > 50


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.0, 0.1, 1.0], [random.Random(0).gauss(0, 1) for _ in range(64)]])
def test_reward_histogram_of_one_few_and_many_values(tmp_path: Path, rewards: list[float]) -> None:
    results = {"base": result(rewards), "champion": result(rewards), "policy": result([reward / 2 for reward in rewards])}
    reward_histogram(results, tmp_path / "rewards.png")
    assert pixels(tmp_path / "rewards.png")[2] > 50
