"""Verifiers, user functions, and what a user reads when a reward is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.config.reward import FunctionReward, ModelReward, ReasoningGymReward
from rl_core.data.generate import create
from rl_core.errors import ConfigError, ModelError, RewardError
from rl_core.rewards import build_reward, probe, reward_fingerprint
from rl_core.rewards.reasoning_gym import EXTRACT
from tests.rl_core.rewards.samples import SIGNATURE, function, gym_prompt, prompt, scores


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("extract", "response", "expected"),
    [
        ("last_number", "3 + 4 = 7.", "7"),
        ("last_number", "It is 1,234.", "1234"),
        ("last_number", "= -1,234,567!", "-1234567"),
        ("last_number", "-3", "-3"),
        ("last_number", "The result is −3.", "-3"),
        ("last_number", "10-3", "3"),
        ("last_number", "(2)-3", "3"),
        ("last_number", "8 - -3", "-3"),
        ("last_number", "3.5.", "3.5"),
        ("last_number", "$1,234.50", "1234.50"),
        ("last_number", ".5", ".5"),
        ("last_number", "1, 2, 3", "3"),
        ("last_number", "1,2", "2"),
        ("last_number", "**7**", "7"),
        ("last_number", "no idea", ""),
        ("last_number", "", ""),
        ("answer_tag", "<answer>1</answer> or <answer> 2\n</answer>", "2"),
        ("answer_tag", "<answer>1", ""),
        ("answer_tag", "7", ""),
        ("text", " 7 ", " 7 "),
    ],
)
def test_extraction(extract, response, expected):
    assert EXTRACT[extract](response) == expected


def test_verifier_scores():
    right = gym_prompt("chain_sum", min_terms=2, max_terms=2)
    reward = build_reward(ReasoningGymReward(kind="reasoning_gym", timeout_s=None))
    answers = [f"The sum is {right.ground_truth}.", "The sum is 0.", "", "I do not know."]
    assert scores(reward, [right] * 4, answers) == [1.0, 0.0, 0.0, 0.0]
    probe(reward, [right, gym_prompt("chain_sum", 1)])


@pytest.mark.parametrize("name", ["arc_agi", "rearc", "countdown", "basic_arithmetic", "gsm_symbolic", "knights_knaves"])
def test_an_entry_from_a_shard_scores_like_a_fresh_one(name):
    """Plain JSON would make the tuples of `arc_agi` lists, and its right answers wrong."""
    generator = create(name, 3, 1, {})
    reward = build_reward(ReasoningGymReward(kind="reasoning_gym", extract="text", timeout_s=None))
    for index in range(3):
        entry = generator[index]
        response = entry["answer"] or "0"
        assert scores(reward, [gym_prompt(name, index)], [response]) == [generator.score_answer(response, entry)]


def test_the_generator_s_options_count():
    """puzzle24 and others score by their configuration; a composite by that of its parts."""
    parts = {"datasets": [{"name": "chain_sum", "weight": 1.0, "config": {"min_terms": 2, "max_terms": 2}}]}
    mixed = gym_prompt("composite", **parts)
    reward = build_reward(ReasoningGymReward(kind="reasoning_gym", timeout_s=None))
    assert scores(reward, [mixed], [f"= {mixed.ground_truth}"]) == [1.0]


def test_a_response_that_the_verifier_cannot_parse_is_worth_nothing():
    """`prime_factorization`'s verifier raises ValueError on a word."""
    reward = build_reward(ReasoningGymReward(kind="reasoning_gym", extract="text", timeout_s=None))
    assert scores(reward, [gym_prompt("prime_factorization")], ["seven"]) == [0.0]


def test_reasoning_gym_on_other_data():
    reward = build_reward(ReasoningGymReward(kind="reasoning_gym", timeout_s=None))
    with pytest.raises(RewardError, match=r"reward.kind.*data.source.kind"):
        probe(reward, [prompt()])


@pytest.mark.parametrize("result", ["{}", "{{'score': {}, 'more': 1}}"])
def test_function_gets_the_sample(tmp_path, result):
    body = SIGNATURE + "    value = (data_source == 'sums') + 10 * (solution_str == ground_truth) + 100 * extra_info['level']\n"
    reward = build_reward(function(tmp_path, body + "    return " + result.format("value")))
    assert scores(reward, [prompt(), prompt(data_source="x")], ["2", "3"]) == [311.0, 300.0]
    probe(reward, [prompt()])


def test_a_file_with_a_dataclass_and_postponed_annotations(tmp_path):
    code = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Grade:
    kinds: ClassVar[int] = 1
    points: float = 0.5
"""
    reward = build_reward(function(tmp_path, code + SIGNATURE + "    return Grade().points"))
    assert scores(reward, [prompt()], ["2"]) == [0.5]


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("def compute_scores(**all): return 1", "compute_score", ["reward.name", "reward.py", "did you mean compute_scores"]),
        ("x = 1", "compute_score", ["has no function"]),
        ("def compute_score(text): return 1", "compute_score", ["takes (text)", "solution_str"]),
        (SIGNATURE + "  return 1\n1/0", "compute_score", ["reward.path", "cannot be imported", "ZeroDivisionError"]),
        ("def (", "compute_score", ["cannot be imported", "SyntaxError"]),
    ],
)
def test_functions_that_cannot_be_loaded(tmp_path, code, name, words):
    with pytest.raises((ConfigError, RewardError)) as caught:
        build_reward(function(tmp_path, code, name))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 'good'", ["'good'", "no finite number"]),
        ("return None", ["None"]),
        ("return float('nan')", ["nan"]),
        ("return float('inf')", ["inf"]),
        ("return {'points': 1}", ["'score'"]),
        ("return {'score': float('nan')}", ["nan"]),
        ("return int(solution_str)", ["raises ValueError", "invalid literal"]),
        ("raise SystemExit(3)", ["raises SystemExit", "3"]),
    ],
)
def test_a_bad_result_names_function_and_sample(tmp_path, body, words):
    reward = build_reward(function(tmp_path, SIGNATURE + "    " + body))
    with pytest.raises(RewardError) as caught:
        probe(reward, [prompt()])
    message = str(caught.value)
    assert all(word in message for word in [*words, "compute_score in", "reward.py", "aaaaaaaaaaaa", "'1+1='", "'2'"]), message


def test_the_original_exception_is_chained(tmp_path):
    reward = build_reward(function(tmp_path, SIGNATURE + "    return {}['x']"))
    with pytest.raises(RewardError) as caught:
        scores(reward, [prompt()], ["2"])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_imports_what_lies_beside_it(tmp_path, monkeypatch):
    """At import and when called, whatever the working directory; a library's name is not taken from the library."""
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "units.py").write_text("ONE = 1.0")
    (tmp_path / "ten_of_mine.py").write_text("TEN = 10.0")
    (tmp_path / "colorsys.py").write_text("ONE = 'not the library'")
    code = "from near.units import ONE\n" + SIGNATURE + "    from ten_of_mine import TEN\n    return ONE + TEN"
    reward = build_reward(function(tmp_path, code))
    assert scores(reward, [prompt()], [""]) == [11.0]
    import colorsys

    assert not hasattr(colorsys, "ONE")


def test_a_change_of_what_it_imports_is_another_reward(tmp_path):
    (tmp_path / "package").mkdir()
    files = ["package/__init__.py", "package/inner.py", "package/sibling.py", "helper.py", "lazy.py"]
    for name in [*files, "unused.py", "rl_core.py"]:
        (tmp_path / name).write_text("")
    (tmp_path / "helper.py").write_text("import package.inner, json")
    (tmp_path / "package" / "inner.py").write_text("from . import sibling")
    (tmp_path / "data").mkdir()
    config = function(tmp_path, "import data, torch, rl_core.errors, helper\n" + SIGNATURE + "    import lazy; return 1")
    assert sorted(reward_fingerprint(config)["imports"]) == sorted(files)
    for name in files:
        before = reward_fingerprint(config)
        with (tmp_path / name).open("a") as file:
            file.write("\n# another")
        assert reward_fingerprint(config) != before
    before = reward_fingerprint(config)
    (tmp_path / "unused.py").write_text("# another")
    assert reward_fingerprint(config) == before
    (tmp_path / "helper.py").write_text("def (")
    with pytest.raises(ConfigError, match=r"reward.path: .*helper.py cannot be imported: SyntaxError"):
        reward_fingerprint(config)


def reward_model(directory: Path) -> ModelReward:
    """Its files without their meaning: a fingerprint looks at bytes only."""
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(f"content of {name}")
    return ModelReward(kind="model", name_or_path=str(directory))


def test_a_reward_model_is_what_its_files_are(tmp_path):
    config = reward_model(tmp_path / "one")
    assert build_reward(config) is None
    first = reward_fingerprint(config)
    assert reward_fingerprint(reward_model(tmp_path / "two")) == first
    for name in first["files"]:
        Path(config.name_or_path, name).write_text("other content")
        second = reward_fingerprint(config)
        assert second != first
        first = second
    assert len(first["files"]) == 4
    assert reward_fingerprint(config.model_copy(update={"torch_dtype": "bfloat16"})) != first
    assert reward_fingerprint(config.model_copy(update={"trust_remote_code": True})) != first
    assert reward_fingerprint(config.model_copy(update={"attn_implementation": "eager"})) == first


def test_keys_are_computed_without_torch(tmp_path):
    config = reward_model(tmp_path / "one")
    code = (
        "import sys; from rl_core.rewards import reward_fingerprint; from rl_core.config.reward import ModelReward\n"
        f"reward_fingerprint(ModelReward(kind='model', name_or_path={config.name_or_path!r}))\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_reward_models_that_are_none(tmp_path):
    with pytest.raises(ModelError, match=r"reward.name_or_path: .* does not exist"):
        reward_fingerprint(ModelReward(kind="model", name_or_path=str(tmp_path / "none")))
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ModelError, match=r"reward.name_or_path: .* GGUF"):
        reward_fingerprint(ModelReward(kind="model", name_or_path=str(tmp_path / "x.gguf")))


def test_missing_file(tmp_path):
    config = FunctionReward(kind="function", path=str(tmp_path / "no.py"))
    for use in (build_reward, reward_fingerprint):
        with pytest.raises(ConfigError, match=r"reward.path.*no such file"):
            use(config)


def test_fingerprints(tmp_path):
    config = function(tmp_path, SIGNATURE + "    return 1")
    first = reward_fingerprint(config)
    other = tmp_path / "elsewhere.py"
    os.link(config.path, other)
    assert reward_fingerprint(FunctionReward(kind="function", path=str(other))) == first
    assert reward_fingerprint(function(tmp_path, SIGNATURE + "    return 2")) != first
    gym = [reward_fingerprint(ReasoningGymReward(kind="reasoning_gym", extract=extract)) for extract in EXTRACT]
    assert len(set(map(json.dumps, gym))) == 3
    assert gym[0]["version"]
