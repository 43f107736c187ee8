"""Users' functions: verl's and TRL's as their documentation has them, and all that a function may return."""

import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_core.config.reward import FunctionReward
from rl_core.errors import ConfigError, RewardError
from rl_core.rewards import Judgement, build_reward, reward_fingerprint
from tests.rl_core.rewards.samples import SIGNATURE, function, judged, prompt, scores

VERL_DOCS = """
def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
  return len(solution_str)/100
"""
VERL_GSM8K_SIGNATURE = """
def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return score if solution_str.endswith(ground_truth) else format_score
"""
VERL_ROUTER_SIGNATURE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 1.0 if solution_str == ground_truth else 0.0, "acc": solution_str == ground_truth, "pred": solution_str,
            "given": len(kwargs)}
"""
TRL_TOKENS = '''
def reward_func(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]
'''
TRL_TEXTS = '''
def reward_func(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character count)."""
    return [float(len(completion)) for completion in completions]
'''
TRL_MESSAGES = '''
import re

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
'''
TRL_COLUMN = r"""
import re

def reward_func(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
"""
TRL_NOT_APPLICABLE = """
def check_math_solution(prompt, completion):
    return completion == {"1+1=": "2"}[prompt]

def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            # Calculate math-specific reward
            correct = check_math_solution(prompt, completion)
            reward = 1.0 if correct else -1.0
            rewards.append(reward)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards
"""
TRL_ASYNC = """
import asyncio

async def async_reward_func(prompts, completions, **kwargs):
    # Simulate an I/O-bound call (e.g., HTTP request, database lookup)
    await asyncio.sleep(0.01)
    # Simple toy reward: 1.0 if the completion is non-empty, else 0.0
    return [1.0 if completion else 0.0 for completion in completions]
"""
TRL_LOGS = r"""
import re

def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    extracted = [re.search(r"\\boxed\{(.*?)\}", c) for c in completions]
    extracted = [m.group(1) if m else None for m in extracted]
    rewards = [1.0 if e == gt else 0.0 for e, gt in zip(extracted, ground_truth)]

    if log_extra:
        log_extra("golden_answer", list(ground_truth))
        log_extra("extracted_answer", [e or "[none]" for e in extracted])

    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))

    return rewards
"""
RESPONSES = [r"\boxed{2}", "2", ""]
THOUGHT = "<think>.</think><answer>2</answer>"


@pytest.mark.parametrize(
    ("code", "name", "settings", "responses", "expected"),
    [
        (VERL_DOCS, "my_reward_fn", {}, ["ab", ""], [0.02, 0.0]),
        (VERL_GSM8K_SIGNATURE, "compute_score", {}, ["#### 2", "3"], [1.0, 0.0]),
        (VERL_ROUTER_SIGNATURE, "compute_score", {}, ["2", "3"], [1.0, 0.0]),
        (TRL_TOKENS, "reward_func", {}, RESPONSES, [10.0, 2.0, 1.0]),
        (TRL_TEXTS, "reward_func", {}, RESPONSES, [9.0, 1.0, 0.0]),
        (TRL_MESSAGES, "format_reward_func", {"completions": "messages"}, [THOUGHT, "2"], [1.0, 0.0]),
        (TRL_COLUMN, "reward_func", {}, RESPONSES, [1.0, 0.0, 0.0]),
        (TRL_ASYNC, "async_reward_func", {}, RESPONSES, [1.0, 1.0, 0.0]),
        (TRL_LOGS, "reward_func", {}, RESPONSES, [1.0, 0.0, 0.0]),
    ],
)  # fmt: skip
def test_functions_from_the_documentation_of_verl_and_trl(
    tmp_path: Path, code: str, name: str, settings: dict[str, Any], responses: list[str], expected: list[float]
) -> None:
    reward = build_reward(function(tmp_path, code, name, **settings))
    assert scores(reward, [prompt()] * len(responses), responses) == expected
    assert judged(reward, [], []) == []


def test_numbers_beside_the_score_are_kept(tmp_path: Path) -> None:
    verl = build_reward(function(tmp_path, VERL_ROUTER_SIGNATURE))
    assert [j.extras for j in judged(verl, [prompt()] * 2, ["2", "3"])] == [
        {"acc": 1.0, "given": 0.0},
        {"acc": 0.0, "given": 0.0},
    ]
    trl = build_reward(function(tmp_path, TRL_LOGS, "reward_func"))
    assert [j.extras for j in judged(trl, [prompt()] * 2, [r"\boxed{2}", ""])] == [{"accuracy": 0.5}] * 2


def test_none_in_a_list_says_that_it_does_not_apply(tmp_path: Path) -> None:
    reward = build_reward(function(tmp_path, TRL_NOT_APPLICABLE, "math_reward_func"))
    prompts = [prompt(extra_info={"task": "math"}), prompt(extra_info={"task": "code"}), prompt(extra_info={})]
    first, *others = judged(reward, prompts, ["2", "2", "2"])
    assert first == Judgement(1.0)
    assert all(math.isnan(j.score) and j.failed == "not_applicable" for j in others)


COLUMNS = """
def reward_func(prompts, completions, completion_ids, answer, ground_truth, data_source, level, unit=None, **others):
    assert prompts == PROMPTS and completions == COMPLETIONS and completion_ids == [[55, 1], [1]], (prompts, completions)
    assert answer == ground_truth == ["2", None] and data_source == ["sums", "sums"] and level == [3, 4], locals()
    assert unit == ["cm", None] and set(others) == {"log_metric"}, (unit, others)
    return [1, 2]
"""


@pytest.mark.parametrize("form", ["text", "messages"])
def test_a_function_that_takes_lists_gets_the_columns_by_their_names(tmp_path: Path, form: str) -> None:
    given, said = ["1+1=", "1+1="], ["7", ""]
    values: list[Any] = [given, said]
    if form == "messages":
        roles = {"user": given, "assistant": said}
        values = [[[{"role": role, "content": text}] for text in texts] for role, texts in roles.items()]
    code = f"PROMPTS = {values[0]}\nCOMPLETIONS = {values[1]}\n{COLUMNS}"
    reward = build_reward(function(tmp_path, code, "reward_func", completions=form), answer_column="answer")
    rows = [prompt(extra_info={"level": 3, "unit": "cm"}), prompt(ground_truth=None, extra_info={"level": 4})]
    assert scores(reward, rows, said) == [1.0, 2.0]


def test_a_column_that_the_data_lacks(tmp_path: Path) -> None:
    reward = build_reward(function(tmp_path, TRL_NOT_APPLICABLE, "math_reward_func", on_error="value"))
    with pytest.raises(RewardError, match=r"reward.name = math_reward_func: .* no column task \(it has .*level.*\)"):
        judged(reward, [prompt(), prompt()], ["2", "2"])


def test_a_single_response_with_its_tokens(tmp_path: Path) -> None:
    reward = build_reward(function(tmp_path, "async def compute_score(solution_str, response_ids): return len(response_ids)"))
    assert scores(reward, [prompt()] * 2, ["abc", ""]) == [4.0, 1.0]


@pytest.mark.parametrize(
    "result",
    ["[1, 2.5, -1.0]", "(1, 2.5, -1)", "{'tokens': [1, 2.5, -1], 'more': 3}", "{'score': numpy.array([1, 2.5, -1])}",
     "torch.tensor([1, 2.5, -1])"],
)  # fmt: skip
def test_one_number_for_each_token(tmp_path: Path, result: str) -> None:
    code = ("import numpy, torch\n" if "numpy" in result or "torch" in result else "") + SIGNATURE + f"    return {result}"
    (judgement,) = judged(build_reward(function(tmp_path, code)), [prompt()], ["ab"])
    assert (judgement.score, judgement.tokens, judgement.failed) == (2.5, [1.0, 2.5, -1.0], None)
    assert judgement.extras == ({"more": 3.0} if "more" in result else {})


@pytest.mark.parametrize("result", ["numpy.float32(0.5)", "numpy.array(0.5)", "{'score': numpy.float64(0.5)}", "True - 0.5"])
def test_numbers_of_other_kinds(tmp_path: Path, result: str) -> None:
    assert scores(build_reward(function(tmp_path, f"import numpy\n{SIGNATURE}    return {result}")), [prompt()], ["x"]) == [0.5]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [1.0, 2.0]", ["2 numbers for the 3 tokens"]),
        ("return [1.0, None, 2.0]", ["not a finite number for each token"]),
        ("return [1.0, float('nan'), 2.0]", ["not a finite number for each token"]),
        ("return {'score': 1, 'tokens': [1, 2, 3]}", ["score and tokens at once"]),
        ("return {}", ["'score'"]),
        ("return 1j", ["1j", "no finite number"]),
        ("return 10**400", ["no finite number"]),
        ("return -1e39", ["-1e+39", "no finite number"]),
        ("return [3e38, 3e38, 0]", ["no finite number in 32 bits"]),
    ],
)
def test_what_is_no_judgement(tmp_path: Path, body: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        judged(build_reward(function(tmp_path, f"{SIGNATURE}    {body}")), [prompt()], ["ab"])
    assert all(word in str(caught.value) for word in [*words, "response 'ab'"]), caught.value


def listed(tmp_path: Path, body: str, **settings: Any) -> FunctionReward:
    return function(tmp_path, f"def compute_score(completions, **columns):\n    {body}", **settings)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1.0", ["returns float, which is no list,", "1 responses"]),
        ("return [1.0] * 2", ["returns 2 values for 1 responses"]),
        ("return ['x' for c in completions]", ["'x'", "no finite number"]),
        ("return [1 / len(c) for c in completions]", ["raises ZeroDivisionError", "line 2 of ", "response ''"]),
    ],
)
def test_of_a_list_the_response_at_fault_is_named(tmp_path: Path, body: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        judged(build_reward(listed(tmp_path, body)), [prompt()] * 3, ["a", "", "b"])
    assert all(word in str(caught.value) for word in words), caught.value


def test_of_a_list_only_the_response_at_fault_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = listed(tmp_path, "return [1 / len(c) for c in completions]", on_error="value", error_value=-1.0)
    with caplog.at_level(logging.WARNING):
        result = judged(build_reward(config), [prompt()] * 4, ["a", "", "bb", ""])
    assert [(j.score, j.failed) for j in result] == [(1.0, None), (-1.0, "error"), (0.5, None), (-1.0, "error")]
    assert [record.getMessage().count("ZeroDivisionError") for record in caplog.records] == [1]  # the second is only counted


def test_a_function_that_fits_single_responses_only_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rewards stand; that it was written for a list and does not give one is no fault of any response."""
    reward = build_reward(listed(tmp_path, "return [float(len(completions[0]))]"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert scores(reward, [prompt()] * 3, ["a", "", "bb"]) == [1.0, 0.0, 2.0]
    (record,) = caplog.records
    assert "returns 1 values for 3 responses when given 3 responses at once" in record.getMessage()


def test_failures_are_counted_by_their_kind(tmp_path: Path) -> None:
    body = "    return {'2': 1.0, '3': float('nan'), '4': None, '5': [1]}[solution_str]\n"
    reward = build_reward(function(tmp_path, SIGNATURE + body, on_error="value", error_value=0.25))
    result = judged(reward, [prompt()] * 5, ["2", "3", "4", "5", "6"])
    assert [j.score for j in result] == [1.0] + [0.25] * 4
    assert [j.failed for j in result] == [None, "invalid", "invalid", "invalid", "error"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def compute_score(text): return 1", ["takes (text)", "data_source, solution_str"]),
        ("def compute_score(ground_truth): return 1", ["takes (ground_truth)"]),
        ("def compute_score(solution_str, other): return 1", ["takes (solution_str, other)"]),
        ("def compute_score(solution_str, /): return 1", ["takes (solution_str, /)"]),
    ],
)
def test_other_signatures_are_refused(tmp_path: Path, code: str, words: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        build_reward(function(tmp_path, code))
    assert all(word in str(caught.value) for word in ["reward.name = compute_score", *words]), caught.value


def test_messages_are_for_functions_that_take_lists(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"takes \(.*\); reward.completions = messages is for those that take prompts and"):
        build_reward(function(tmp_path, VERL_DOCS, "my_reward_fn", completions="messages"))


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the working directory as `python -m` finds it; its package is part of what it is."""
    package = tmp_path / "my_rewards_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("FACTOR = 2.0")
    (package / "helper.py").write_text("OFFSET = 1.0")
    (package / "sums.py").write_text(
        "from my_rewards_of_a_test import FACTOR, helper\ndef judge(solution_str):\n    return FACTOR + helper.OFFSET"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = FunctionReward(kind="function", module="my_rewards_of_a_test.sums", name="judge")
    first = reward_fingerprint(config)
    assert sorted(first["imports"]) == ["my_rewards_of_a_test/__init__.py", "my_rewards_of_a_test/helper.py"]
    for timeout_s in (None, 60.0):
        assert scores(build_reward(config.model_copy(update={"timeout_s": timeout_s})), [prompt()], [""]) == [3.0]
    for name in ("__init__", "helper", "sums"):
        before = reward_fingerprint(config)
        with (package / f"{name}.py").open("a") as file:
            file.write("\n# another")
        assert reward_fingerprint(config) != before
    with pytest.raises(ConfigError, match=r"reward.name = judgement: my_rewards_of_a_test.sums has no .*did you mean judge"):
        build_reward(config.model_copy(update={"name": "judgement", "timeout_s": None}))
    with pytest.raises(ConfigError, match=r"reward.module = my_rewards_of_a_test.none: Python finds no such module"):
        reward_fingerprint(config.model_copy(update={"module": "my_rewards_of_a_test.none"}))


def test_the_fingerprint_of_an_installed_module_stays_in_its_package() -> None:
    config = FunctionReward(kind="function", module="yaml.nodes", name="Node")
    assert set(reward_fingerprint(config)["imports"]) >= {"yaml/__init__.py", "yaml/loader.py"}
    assert all(name.startswith("yaml/") for name in reward_fingerprint(config)["imports"])


def test_what_is_in_the_fingerprint(tmp_path: Path) -> None:
    config = function(tmp_path, VERL_DOCS, "my_reward_fn")
    first = reward_fingerprint(config)
    assert reward_fingerprint(config.model_copy(update={"timeout_s": 5.0})) == first
    others = [{"on_error": "value"}, {"on_error": "value", "error_value": 1.0}, {"completions": "messages"}]
    prints = [first, *(reward_fingerprint(config.model_copy(update=other)) for other in others)]
    assert all(prints.count(one) == 1 for one in prints)
