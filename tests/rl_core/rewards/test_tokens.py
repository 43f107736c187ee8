"""The policy's ids as the reward model reads them; expected ids are spelled out by hand."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl_core.errors import ModelError, RewardError
from rl_core.rewards.tokens import RewardTokens
from tests.rl_core.rewards.tokenizers import BEGIN, END, byte_ids, byte_tokenizer
from tests.tiny import CHARACTERS, SPECIAL, tiny_tokenizer

SIZE = len(SPECIAL) + len(CHARACTERS)
POLICY_END = SPECIAL.index("<end>")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("policy")))


def ids(*parts: str) -> list[int]:
    """The policy's ids of special tokens and of texts."""
    return [
        index
        for part in parts
        for index in ([SPECIAL.index(part)] if part in SPECIAL else [len(SPECIAL) + CHARACTERS.index(c) for c in part])
    ]


PROMPTS = [ids("<u>", "1+1=", "<end>", "<a>"), ids("<u>", "a\nb", "<end>", "<a>"), ids("<u>", "x", "<end>", "<a>")]
RESPONSES = [ids("2", "<end>"), ids("<pad>", "long"), []]


def test_the_same_vocabulary_keeps_the_ids(tmp_path: Path, policy: Any) -> None:
    more = tiny_tokenizer(tmp_path)
    text = json.loads((more / "tokenizer.json").read_text())
    text["added_tokens"].append({**text["added_tokens"][0], "id": SIZE, "content": "<more>"})
    text["model"]["vocab"]["<more>"] = SIZE
    (more / "tokenizer.json").write_text(json.dumps(text))
    larger = AutoTokenizer.from_pretrained(more)
    assert len(larger) == SIZE + 1
    for own in (policy, larger):
        tokens = RewardTokens(policy, own, SIZE + 1, 256)
        assert tokens.encode(PROMPTS, RESPONSES) == [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        assert tokens.cut == 0


def test_another_vocabulary_gets_the_text(tmp_path: Path, policy: Any) -> None:
    tokens = RewardTokens(policy, AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path)), 258, None)
    assert tokens.encode(PROMPTS, RESPONSES) == [
        [BEGIN, *byte_ids("1+1=2"), END],  # it ended, and so it does for the reward model
        [BEGIN, *byte_ids("a\nblong")],  # cut short
        [BEGIN, *byte_ids("x")],
    ]


def test_the_same_tokens_with_other_ids(tmp_path: Path, policy: Any) -> None:
    """Ids of one would be legal in the other, and mean something else."""
    text = json.loads((tiny_tokenizer(tmp_path) / "tokenizer.json").read_text())
    names = [*SPECIAL, *reversed(CHARACTERS)]
    text["model"]["vocab"] = {name: index for index, name in enumerate(names)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    tokens = RewardTokens(policy, AutoTokenizer.from_pretrained(tmp_path), SIZE, None)
    assert tokens.encode(PROMPTS[:1], RESPONSES[:1]) == [[*map(names.index, "1+1=2"), POLICY_END]]


def test_a_row_without_any_text_has_a_token(tmp_path: Path, policy: Any) -> None:
    tokens = RewardTokens(policy, AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path, begins=False)), 258, None)
    assert tokens.encode([ids("<u>")], [[]]) == [[END]]


def test_too_long_rows_lose_the_beginning_of_the_prompt(tmp_path: Path, policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokens = RewardTokens(policy, policy, SIZE, 4)
        assert tokens.encode(PROMPTS, RESPONSES) == [ids("<end>", "<a>", "2", "<end>"), ids("long"), PROMPTS[2]]
        other = RewardTokens(policy, AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path)), 258, 4)
        assert other.encode(PROMPTS, RESPONSES)[0] == [BEGIN, *byte_ids("=2"), END]
        assert (tokens.cut, other.cut) == (2, 2)
    assert [record.args for record in caplog.records] == [(9, 4), (7, 4)]


def test_ids_out_of_the_vocabulary_are_refused(tmp_path: Path, policy: Any) -> None:
    tokens = RewardTokens(policy, policy, SIZE, 256)
    assert tokens.encode([[SIZE - 1]], [[]]) == [[SIZE - 1]]
    with pytest.raises(RewardError, match=rf"reward.name_or_path: .* id {SIZE}, .* {SIZE} rows"):
        tokens.encode([[1], [2]], [[3], [SIZE]])
    own = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path))
    with pytest.raises(ModelError, match=r"reward.name_or_path: .* ids up to 257 .* 257 rows"):
        RewardTokens(policy, own, 257, None)
