"""The scores of a batch: from functions, from a reward model and from both, on one rank and on two."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from rl_core.config import Config
from rl_core.data.prompts import Prompt
from rl_core.distributed import World
from rl_core.errors import RewardError
from rl_core.groups import make_groups
from rl_core.models.reward_model import build_reward_model
from rl_core.rewards import build_reward
from rl_core.role import Role
from rl_core.rollout.batch import RolloutBatch
from rl_core.scoring import Scorer, Scores
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config
from tests.tiny import CHARACTERS, SPECIAL, tiny_model

END = SPECIAL.index("<end>")
TEXTS = ["12", "7", "", "345", "7", "9"]
"""Two responses to each of three prompts; all but the empty one end with an end token."""
CODE = """
def length(solution_str, ground_truth):
    return {"score": len(solution_str), "right": solution_str == ground_truth}

def steps(response_ids):
    return [float(place) for place, _ in enumerate(response_ids)]

def only_some(completions, **columns):
    return [float(len(text)) if len(text) == 2 else None for text in completions]

def none(completions, **columns):
    return [None for _ in completions]

def some_fail(solution_str):
    return 1 / len(solution_str.replace("7", ""))

def one_fails(solution_str):
    return 1 / (345 - int(solution_str or 0))

def all_fail(solution_str):
    raise ValueError("no")
"""


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def batch() -> RolloutBatch:
    responses = [[*ids(text), END] if text else [] for text in TEXTS]
    return RolloutBatch.from_lists(
        [ids(f"{row // 2}=") for row in range(6)], responses, [[0.0] * len(r) for r in responses], [False] * 6, list(range(6))
    )


def prompts() -> list[Prompt]:
    return [Prompt(f"{n}" * 64, ids(f"{n}="), f"{n}=", f"{n}=", truth, "sums", {}) for n, truth in enumerate(["7", "345", "9"])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("scoring")
    tiny_model(directory / "judge", initializer_range=0.3)
    (directory / "reward.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(directory / "home"))
        yield directory


def function(directory: Path, name: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "function", "path": str(directory / "reward.py"), "name": name, "timeout_s": None} | settings


def weighted(*parts: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "weighted", "parts": [{"weight": weight, "reward": reward} for weight, reward in parts]}


def scorer(settings: Config, directory: Path, world: World) -> Scorer:
    tokenizer, judge = AutoTokenizer.from_pretrained(directory / "judge"), None
    if "reward" in settings.roles():
        group = make_groups(settings, ["reward"], "cpu")["reward"]
        judge = Role("reward", build_reward_model(settings, group, world.device, tokenizer), group, settings, world.device)
    return Scorer(settings, tokenizer, world, build_reward(settings.reward), judge)


@contextmanager
def alone() -> Iterator[World]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def scored(rank: int, directory: Path, rewards: list[dict[str, Any]]) -> list[Scores | str]:
    """What each reward gives, or its message."""
    world = World(rank, dist.get_world_size(), torch.device("cpu"))
    results: list[Scores | str] = []
    for reward in rewards:
        settings = config(reward=reward, trainer={"per_device_train_batch_size": 2}).settled(world.size)
        try:
            results.append(scorer(settings, directory, world)(prompts(), batch(), n=2))
        except RewardError as error:
            results.append(str(error))
    return results


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, list[Any]]:
    """Of each case, what one rank says, then both of two."""
    judge = {"kind": "model", "name_or_path": str(directory / "judge")}
    length, steps = function(directory, "length"), function(directory, "steps")
    cases = {
        "length": length,
        "elsewhere": function(directory, "length", timeout_s=120.0),
        "steps": steps,
        "only some": function(directory, "only_some"),
        "some fail": function(directory, "some_fail", on_error="value", error_value=-1.0),
        "stops": function(directory, "one_fails"),
        "all fail": function(directory, "all_fail", on_error="value"),
        "judge": judge,
        "all": weighted((2.0, length), (0.5, judge), (10.0, steps)),
        "judge where nothing applies": weighted((0.5, judge), (1.0, function(directory, "none"))),
        "half a judge": weighted((0.5, judge)),
    }
    seen: dict[str, list[Any]] = {name: [] for name in cases}
    with alone():
        said = [scored(0, directory, list(cases.values()))]
    for rank in said + run_ranks(scored, 2, directory, list(cases.values())):
        for name, result in zip(cases, rank, strict=True):
            seen[name].append(result)
    return seen


def check(results: list[Scores], total: list[float], tokens: list[list[float]], metrics: dict[str, list[float]]) -> None:
    for result in results:
        assert result.total.dtype == result.tokens.dtype == torch.float32
        assert result.total.tolist() == total
        assert result.tokens.tolist() == tokens
        assert result.metrics == metrics


def at_the_end(scores: list[float]) -> list[list[float]]:
    """[6, 4]: the longest response has three characters and an end token."""
    ends = [len(text) if text else None for text in TEXTS]
    return [[score if place == end else 0.0 for place in range(4)] for score, end in zip(scores, ends, strict=True)]


@pytest.mark.parametrize("name", ["length", "elsewhere"])
def test_a_score_falls_at_the_last_token(name: str, results: dict[str, Any]) -> None:
    lengths = [2.0, 1.0, 0.0, 3.0, 1.0, 1.0]
    check(results[name], lengths, at_the_end(lengths), {"reward/right": [0, 1, 0, 1, 0, 1]})


def test_scores_of_tokens_fall_where_they_belong(results: dict[str, Any]) -> None:
    rows = [[0, 1, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 0, 0], [0, 1, 0, 0]]
    check(results["steps"], [3, 1, 0, 6, 1, 1], rows, {})


def test_what_no_reward_applies_to_is_worth_nothing(results: dict[str, Any]) -> None:
    total = [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    check(results["only some"], total, at_the_end(total), {"reward/failed/not_applicable": [0, 1, 1, 1, 1, 1]})


def test_failures_are_counted(results: dict[str, Any]) -> None:
    total = [0.5, -1.0, -1.0, torch.tensor(1 / 3).item(), -1.0, 1.0]
    check(results["some fail"], total, at_the_end(total), {"reward/failed/error": [0, 1, 1, 0, 1, 0]})


def test_it_stops_on_all_ranks(results: dict[str, Any]) -> None:
    for message in results["stops"]:
        assert "one_fails in" in message
        assert "raises ZeroDivisionError" in message
    assert len(set(results["stops"])) == 1, "also where another rank judged the response"
    assert all(message.startswith("reward: none of the 6 responses could be judged") for message in results["all fail"])


def test_a_model_alone_and_with_functions(results: dict[str, Any]) -> None:
    alone = results["judge"][0].total
    assert alone.std() > 0.1
    rest = [2 * 2.0 + 30, 2 * 1.0 + 10, 0.0, 2 * 3.0 + 60, 2 * 1.0 + 10, 2 * 1.0 + 10]
    for model, mixed, where_none, half in zip(
        *(results[name] for name in ("judge", "all", "judge where nothing applies", "half a judge")), strict=True
    ):
        torch.testing.assert_close(model.total, alone, rtol=0, atol=1e-5)
        placed = torch.where(batch().response_length > 0, alone, 0.0)
        torch.testing.assert_close(model.tokens.sum(dim=1), placed, rtol=0, atol=1e-5)
        assert model.metrics == {}
        torch.testing.assert_close(mixed.total, torch.tensor(rest) + 0.5 * alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(mixed.tokens[3], torch.tensor([0, 10, 20, 30 + 6 + 0.5 * alone[3]]), rtol=0, atol=1e-5)
        assert mixed.tokens[2].tolist() == [0.0] * 4
        assert set(mixed.metrics) == {"reward/length", "reward/length/right", "reward/model", "reward/steps"}
        torch.testing.assert_close(torch.tensor(mixed.metrics["reward/model"]), alone, rtol=0, atol=1e-5)
        assert mixed.metrics["reward/length"] == [2, 1, 0, 3, 1, 1]
        for result in (where_none, half):
            torch.testing.assert_close(result.total, 0.5 * alone, rtol=0, atol=1e-5)


def test_it_is_said_once_that_no_reward_applies(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with alone() as world, caplog.at_level(logging.WARNING):
        score = scorer(config(reward=function(directory, "only_some")).settled(1), directory, world)
        for _ in range(2):
            score(prompts(), batch(), n=2)
    assert [record.getMessage().count("no reward applies to (None) is worth 0") for record in caplog.records] == [1]
