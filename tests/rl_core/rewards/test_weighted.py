"""Several rewards, weighted: the sum, its parts as metrics, and what errors call them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config, parse_config
from rl_core.config.keys import leaves
from rl_core.config.reward import RewardConfig, WeightedReward, model_of, weight_of_model, with_model
from rl_core.errors import ConfigError, RewardError
from rl_core.rewards import Judgement, build_reward, reward_fingerprint
from tests.rl_core.rewards.samples import SIGNATURE, function, judged, prompt

REGEX = {"kind": "regex", "pattern": r"\d+", "timeout_s": None}
MODEL = {"kind": "model", "name_or_path": "judge"}


def weighted(*parts: tuple[float, Any]) -> WeightedReward:
    rewards = [part if isinstance(part, dict) else part.model_dump() for _, part in parts]
    pairs = zip(parts, rewards, strict=True)
    return WeightedReward(kind="weighted", parts=[{"weight": weight, "reward": reward} for (weight, _), reward in pairs])


def read(reward: dict[str, Any]) -> RewardConfig:
    return parse_config({"model": {"name_or_path": "m"}, "reward": reward}).reward


def test_the_weighted_sum_and_its_parts(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    length = function(tmp_path, SIGNATURE + "    return {'score': len(solution_str), 'blanks': solution_str.count(' ')}")
    code = "def compute_score(completions, **columns): return [0.5 if text else None for text in completions]"
    half = function(tmp_path / "other", code)
    reward = build_reward(weighted((2.0, REGEX), (-0.5, length), (1.0, half)))
    assert judged(reward, [prompt()] * 2, ["a 2", ""]) == [
        Judgement(2.0 - 1.5 + 0.5, extras={"regex": 1, "compute_score": 3, "compute_score/blanks": 1, "compute_score_2": 0.5}),
        Judgement(0.0, extras={"regex": 0, "compute_score": 0, "compute_score/blanks": 0}),
    ]


def test_numbers_for_each_token_are_added_where_they_stand(tmp_path: Path) -> None:
    tokens = function(tmp_path, "def compute_score(response_ids, **more): return [10.0 * i for i in range(len(response_ids))]")
    (judgement,) = judged(build_reward(weighted((3.0, REGEX), (0.5, tokens))), [prompt()], ["2."])
    assert (judgement.score, judgement.tokens) == (3.0 + 15.0, [0.0, 5.0, 10.0 + 3.0])


def test_where_no_part_applies_and_where_one_fails(tmp_path: Path) -> None:
    code = "def compute_score(completions, **columns): return [{'': None, 'bad': 'bad'}.get(c, 1.0) for c in completions]"
    only = function(tmp_path, code, on_error="value", error_value=-1.0)
    none, bad, good = judged(build_reward(weighted((2.0, only))), [prompt()] * 3, ["", "bad", "2"])
    assert math.isnan(none.score)
    assert none.failed == "not_applicable"
    assert (bad.score, bad.failed) == (-2.0, "invalid")
    assert (good.score, good.failed) == (2.0, None)
    strict = weighted((1.0, REGEX), (2.0, only.model_copy(update={"on_error": "raise", "error_value": 0.0})))
    with pytest.raises(RewardError, match=r"^reward.parts\[1\].reward: compute_score in .*'bad'"):
        judged(build_reward(strict), [prompt()], ["bad"])


def test_a_model_is_found_in_it() -> None:
    config = weighted((2.0, REGEX), (0.25, MODEL))
    judge = model_of(config)
    assert judge is not None
    assert (judge.name_or_path, weight_of_model(config)) == ("judge", 0.25)
    other = with_model(config, judge.model_copy(update={"name_or_path": "other"}))
    assert [part.weight for part in other.parts] == [2.0, 0.25]
    assert model_of(other).name_or_path == "other"
    assert (model_of(judge), weight_of_model(judge)) == (judge, 1.0)
    assert (model_of(weighted((1.0, REGEX))), weight_of_model(weighted((1.0, REGEX)))) == (None, 0.0)
    assert build_reward(weighted((2.0, MODEL))) is None
    (judgement,) = judged(build_reward(config), [prompt()], ["2"])
    assert judgement.score == 2.0


def test_identity_and_fingerprint_are_those_of_the_parts(tmp_path: Path) -> None:
    one = function(tmp_path, SIGNATURE + "    return 1")
    config = weighted((2.0, REGEX), (1.0, one))
    first = (config.identity(), reward_fingerprint(config))
    json.dumps(first)
    alone = [reward_fingerprint(part.reward) for part in config.parts]
    assert first[1] == {"kind": "weighted", "parts": [[2.0, alone[0]], [1.0, alone[1]]]}
    moved = tmp_path / "elsewhere.py"
    moved.write_text(Path(str(one.path)).read_text())
    same = weighted((2.0, REGEX | {"timeout_s": 3.0}), (1.0, one.model_copy(update={"path": str(moved)})))
    assert (same.identity(), reward_fingerprint(same)) == first
    for other in (weighted((3.0, REGEX), (1.0, one)), weighted((2.0, REGEX | {"pattern": "x"}), (1.0, one))):
        assert other.identity() != first[0]
        assert reward_fingerprint(other) != first[1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], ["reward.parts"]),
        ([{"weight": 1, "reward": {"kind": "wrong"}}], ["reward.parts[0].reward", "'wrong'", "'function'"]),
        ([{"weight": 1, "reward": REGEX | {"pattrn": 1}}], ["reward.parts[0].reward.pattrn"]),
        ([{"weight": 1, "reward": REGEX}, {"reward": REGEX}], ["reward.parts[1].weight: Field required"]),
        ([{"weight": 1, "reward": {"kind": "function"}}], ["reward.parts[0].reward: reward.path and reward.module"]),
        ([{"weight": 1, "reward": REGEX | {"error_value": 1}}], ["reward.parts[0].reward: reward.error_value has no effect"]),
        ([{"weight": 1, "reward": MODEL}] * 2, ["reward.parts[0, 1]: a run has one reward model at most"]),
        ([{"weight": 1, "reward": {"kind": "weighted", "parts": []}}], ["reward.parts[0].reward", "'weighted'"]),
    ],
)
def test_parts_that_are_wrong_are_named(parts: list[Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"kind": "weighted", "parts": parts})
    assert all(word in str(caught.value) for word in words), caught.value


FALLIBLE = {"timeout_s": 1.5, "on_error": "value", "error_value": -1.0}
EXAMPLES: dict[str, dict[str, Any]] = {
    "reasoning_gym": {"extract": "text"} | FALLIBLE,
    "function": {"path": "r.py", "name": "f", "completions": "messages"} | FALLIBLE,
    "math": FALLIBLE,
    "regex": {"pattern": "a(b)", "group": 1, "normalise": False} | FALLIBLE,
    "http": {"url": "http://h/", "headers": {"A": "$B"}, "batch_size": 3, "retries": 1} | FALLIBLE,
    "model": {"name_or_path": "m", "revision": "r", "torch_dtype": "bfloat16", "fsdp": {"strategy": "ddp"}},
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_part_is_read_as_the_reward_alone(kind: str) -> None:
    """So every key that has an effect alone has it in a part."""
    given = {"kind": kind, **EXAMPLES[kind]}
    source = {"source": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9}}
    alone: Config = parse_config({"model": {"name_or_path": "m"}, "data": source, "reward": given})
    part: Any = read({"kind": "weighted", "parts": [{"weight": 1, "reward": given}]})
    assert part.parts[0].reward == alone.reward
    own = {name.split("].", 1)[1] for name, _ in leaves() if name.startswith(f"reward[{kind}]")}
    assert {name.split("].")[-1] for name, _ in leaves() if name.startswith(f"reward[weighted].parts.reward[{kind}]")} == own
