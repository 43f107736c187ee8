"""Answers found by a pattern or by math-verify, compared with the right one."""

import sys
from importlib import metadata
from typing import Any

import pytest

from rl_core.config import parse_config
from rl_core.config.reward import MathReward, RegexReward
from rl_core.errors import ConfigError, RewardError
from rl_core.rewards import build_reward, reward_fingerprint
from tests.rl_core.rewards.samples import prompt, scores

GSM8K = r"#### (-?[$0-9.,]+)"


@pytest.mark.parametrize(
    ("settings", "response", "truth", "score"),
    [
        ({"pattern": GSM8K, "group": 1}, "so #### 8\nno: #### 18", "18", 1.0),  # the last one
        ({"pattern": GSM8K, "group": 1}, "#### 18\nno: #### 8", "18", 0.0),
        ({"pattern": GSM8K, "group": 1}, "18", "18", 0.0),
        ({"pattern": GSM8K, "group": 1}, "", "", 0.0),
        ({"pattern": GSM8K, "group": 1}, "#### $1,800.00.", "1800", 1.0),
        ({"pattern": GSM8K, "group": 1}, "#### -18", "18", 0.0),
        ({"pattern": r".+"}, "−3", "-3.0", 1.0),
        ({"pattern": r".+"}, "1,2", "12", 0.0),  # no thousands
        ({"pattern": r".+"}, "50 %", "50", 1.0),
        ({"pattern": r".+"}, "1e3", "1000", 1.0),
        ({"pattern": r".+"}, "nan", "NaN", 1.0),  # a word
        ({"pattern": r"(?s)<answer>(?P<it>.*?)</answer>", "group": "it"}, "<answer> New\n York </answer>", "new york", 1.0),
        ({"pattern": r"(?s)<answer>(?P<it>.*?)</answer>"}, "<answer>2</answer>", "2", 0.0),  # all of the match
        ({"pattern": r".+", "normalise": False}, "2.0", "2", 0.0),
        ({"pattern": r".+", "normalise": False}, "2", "2", 1.0),
        ({"pattern": r"a(b)?", "group": 1}, "a", "b", 0.0),  # a group that found nothing
        ({"pattern": r".+"}, "2", None, 0.0),
    ],
)
def test_a_pattern(settings: dict[str, Any], response: str, truth: str | None, score: float) -> None:
    reward = build_reward(RegexReward(kind="regex", timeout_s=None, **settings))
    assert scores(reward, [prompt(ground_truth=truth)], [response]) == [score]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pattern": "("}, ["reward.pattern = '(' is no regular expression"]),
        ({"pattern": "a(b)", "group": 2}, ["reward.group = 2", "it has 0, 1"]),
        ({"pattern": "(?P<x>a)", "group": "y"}, ["reward.group = 'y'", "it has 0, 1, x"]),
    ],
)
def test_patterns_that_are_none(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"name_or_path": "m"}, "reward": {"kind": "regex", **settings}})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        ("18", "The answer is 18.", 1.0),
        ("18", r"so \boxed{18.0}", 1.0),
        ("18", "17", 0.0),
        ("18", "", 0.0),
        ("18", "I do not know", 0.0),
        (r"\frac{1}{2}", "it is 0.5", 1.0),
        ("1/2", r"$\frac{2}{4}$", 1.0),
        (r"The answer is $\frac{1}{2}$.", r"\boxed{0.5}", 1.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0),
        ("x^2+2x+1", "$(x+1)^3$", 0.0),
        ("1,800", "1800 dollars", 1.0),
        ("(1,2)", r"\boxed{(1, 2)}", 1.0),
        ("(1,2)", r"\boxed{(2, 1)}", 0.0),
        (r"\sqrt{2}", "1.4142135623730951", 1.0),
    ],
)
def test_mathematics(truth: str, response: str, score: float) -> None:
    pytest.importorskip("math_verify")
    reward = build_reward(MathReward(kind="math", timeout_s=None))
    assert scores(reward, [prompt(ground_truth=truth)], [response]) == [score]


def test_a_right_answer_that_is_none() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match=r"math-verify finds no answer in the ground_truth '' on .*data.answer_column"):
        scores(build_reward(MathReward(kind="math", timeout_s=None)), [prompt(ground_truth=None)], ["2"])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python finds no package whose directory is not in its path."""
    for place in [place for place in sys.path if "site-packages" in place]:
        monkeypatch.setattr(sys, "path", [other for other in sys.path if other != place])
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("math-verify")
    config = MathReward(kind="math", timeout_s=None)
    for use in (build_reward, reward_fingerprint):
        with pytest.raises(ConfigError, match=r"reward.kind = math needs math-verify: pip install 'ppoflow\[math\]'"):
            use(config)


def test_fingerprints() -> None:
    pytest.importorskip("math_verify")
    assert reward_fingerprint(MathReward(kind="math"))["version"] == metadata.version("math-verify")
    patterns = [{"pattern": "a(b)"}, {"pattern": "a(b)", "group": 1}, {"pattern": "a(b)", "normalise": False}, {"pattern": "(b)"}]
    prints = [reward_fingerprint(RegexReward(kind="regex", **settings)) for settings in patterns]
    assert all(prints.count(one) == 1 for one in prints)
