"""Chat template, length limit, dropped rows, split, and the shards on disk."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from rl_core.config.data import DataConfig
from rl_core.data.prompts import Prompts
from rl_core.data.tokenize import tokenize
from rl_core.errors import DataError
from tests.tiny import CHARACTERS, SPECIAL, tiny_tokenizer

IDS = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
PAD, END, U, S, A, UNK = range(6)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(tokenizer_files):
    return AutoTokenizer.from_pretrained(tokenizer_files)


def config(path: Path, rows: list[dict], **settings) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DataConfig(source={"kind": "files", "path": str(path)}, **{"eval_fraction": 0.5} | settings)


def sums(count: int) -> list[dict]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(count)]


def ids(text: str) -> list[int]:
    return [IDS[character] for character in text]


def all_prompts(directory: Path) -> dict[str, list]:
    return {
        split: list(map(Prompts(directory, split).__getitem__, range(len(Prompts(directory, split)))))
        for split in ("train", "eval")
    }


def both(directory: Path) -> list:
    return [prompt for prompts in all_prompts(directory).values() for prompt in prompts]


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_ids_are_those_of_the_template(tmp_path, tokenizer):
    rows = [*sums(8), {"prompt": [{"role": "system", "content": "Be."}, {"role": "user", "content": "x"}], "answer": "1"}]
    tokenize(config(tmp_path / "a.jsonl", rows, system_prompt="Add.", suffix=" Go"), tokenizer, tmp_path / "out")
    found = {prompt.question: prompt for prompt in both(tmp_path / "out")}
    assert len(found) == 9
    three = found["3+1= Go"]
    assert three.input_ids == [S, *ids("Add."), END, U, *ids("3+1= Go"), END, A]
    assert three.text == "<s>Add.<end><u>3+1= Go<end><a>"
    assert (three.ground_truth, three.data_source, three.extra_info) == ("4", "files", {})
    assert found["x Go"].input_ids == [S, *ids("Be."), END, U, *ids("x Go"), END, A]


def test_columns(tmp_path, tokenizer):
    rows = [{"q": f"{i}", "a": i, "from": f"set{i}", "level": i, "more": {"x": [i]}} for i in range(9)]
    settings = {"prompt_column": "q", "answer_column": "a", "data_source_column": "from"}
    tokenize(config(tmp_path / "a.jsonl", rows, **settings), tokenizer, tmp_path / "out")
    prompt = next(prompt for prompt in both(tmp_path / "out") if prompt.question == "4")
    assert (prompt.ground_truth, prompt.data_source, prompt.extra_info) == ("4", "set4", {"level": 4, "more": {"x": [4]}})


LONG = "0123456789"
WHOLE = [U, *ids(LONG), END, A]


@pytest.mark.parametrize(
    ("truncation", "limit", "expected"),
    [
        ("left", 6, WHOLE[-6:]),
        ("right", 6, WHOLE[:6]),
        ("left", 13, WHOLE),
        ("drop", 13, WHOLE),
        ("error", 13, WHOLE),
        ("drop", 12, None),
    ],
)
def test_truncation(tmp_path, tokenizer, truncation, limit, expected):
    rows = [{"prompt": c, "answer": c} for c in "abcdefgh"] + [{"prompt": LONG, "answer": "!"}]
    settings = {"truncation": truncation, "max_prompt_length": limit, "max_dropped_share": 0.2}
    stats = tokenize(config(tmp_path / "a.jsonl", rows, **settings), tokenizer, tmp_path / "out")
    found = [prompt.input_ids for prompt in both(tmp_path / "out") if prompt.ground_truth == "!"]
    assert found == ([] if expected is None else [expected])
    assert stats["truncated"] == (expected is not None and expected != WHOLE)
    assert stats["prompt_length"]["max"] == (4 if expected is None else len(expected))
    if expected is None:
        [example] = stats["dropped"]["too_long"]["examples"]
        assert (stats["dropped"]["too_long"]["rows"], example["index"]) == (1, 8)
        assert "13 tokens" in example["detail"]


def test_truncation_error_names_row_and_remedy(tmp_path, tokenizer):
    rows = [*sums(3), {"prompt": LONG, "answer": "!"}]
    with pytest.raises(DataError, match=r"data.max_prompt_length = 12: row 3 has 13 tokens .*data.truncation"):
        tokenize(config(tmp_path / "a.jsonl", rows, max_prompt_length=12), tokenizer, tmp_path / "out")


BAD = [
    {"prompt": [{"role": "user", "content": "no!"}], "answer": "1"},  # the template below refuses it
    {"prompt": [{"role": "user", "content": "  "}], "answer": "1"},
    {"prompt": [], "answer": "1"},
    {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "1"},
    {"prompt": [{"role": "user"}], "answer": "1"},
]


def test_dropped_rows_are_counted_by_reason(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% if '!' in messages[-1].content %}{{ raise_exception('no shouting') }}{% endif %}" + tokenizer.chat_template
    )
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "answer": "1"} for i in range(15)] + BAD
    stats = tokenize(config(tmp_path / "a.jsonl", rows, max_dropped_share=0.25, shard_rows=6), tokenizer, tmp_path / "out")
    assert {reason: dropped["rows"] for reason, dropped in stats["dropped"].items()} == {
        "template_error": 1, "empty_prompt": 2, "bad_row": 2,
    }  # fmt: skip
    assert (stats["rows"], stats["train_rows"] + stats["eval_rows"]) == (20, 15)
    assert "no shouting" in stats["dropped"]["template_error"]["examples"][0]["detail"]
    assert [example["index"] for example in stats["dropped"]["bad_row"]["examples"]] == [18, 19]
    with pytest.raises(
        DataError, match=r"data.max_dropped_share = 0.24: 5 of .* The first is row 15, template_error: .*no shouting"
    ):
        tokenize(config(tmp_path / "a.jsonl", rows, max_dropped_share=0.24), tokenizer, tmp_path / "other")


def test_stats(tmp_path, tokenizer):
    """Prompts of 1…20 characters: 4…23 tokens with the template's three."""
    rows = [{"prompt": "x" * n, "answer": "1"} for n in range(1, 21)]
    stats = tokenize(config(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "out")
    length = stats["prompt_length"]
    assert [length[name] for name in ("min", "mean", "p50", "p95", "max")] == [4, 13.5, 13, 22, 23]
    assert [(bar["from"], bar["to"], bar["prompts"]) for bar in length["histogram"]][:3] == [(1, 2, 0), (3, 4, 1), (5, 6, 2)]
    assert sum(bar["prompts"] for bar in length["histogram"]) == 20
    assert (stats["pad_token_id"], stats["pad_token_from"], stats["eos_token_id"]) == (PAD, "pad", END)
    assert json.loads((tmp_path / "out" / "stats.json").read_text()) == stats


def test_pad_is_settled_without_new_tokens(tmp_path, tokenizer):
    tokenizer.pad_token = None
    size = len(tokenizer)
    stats = tokenize(config(tmp_path / "a.jsonl", sums(9)), tokenizer, tmp_path / "out")
    assert (stats["pad_token_id"], stats["pad_token_from"]) == (END, "eos")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert (saved.pad_token_id, len(saved), saved.chat_template) == (END, size, tokenizer.chat_template)


def test_no_chat_template(tmp_path):
    bare = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "bare", chat_template=None))
    with pytest.raises(DataError, match=r"model\.chat_template"):
        tokenize(config(tmp_path / "a.jsonl", sums(9)), bare, tmp_path / "out")


def test_a_prompt_never_changes_sides(tmp_path, tokenizer):
    """More rows before, between and behind, other settings, a second answer: each prompt stays where it was."""
    tokenize(config(tmp_path / "a.jsonl", sums(40)), tokenizer, tmp_path / "one")
    mixed = [row for pair in zip(sums(80)[40:], sums(40), strict=True) for row in pair] + [{"prompt": "3+1=", "answer": "four"}]
    tokenize(config(tmp_path / "b.jsonl", mixed, suffix="?", shard_rows=11), tokenizer, tmp_path / "two")
    one, two = all_prompts(tmp_path / "one"), all_prompts(tmp_path / "two")
    for split in one:
        assert {prompt.prompt_id for prompt in one[split]} <= {prompt.prompt_id for prompt in two[split]}
    assert len({split for split, prompts in two.items() for prompt in prompts if prompt.question == "3+1=?"}) == 1
    assert sum(map(len, two.values())) == 81
    assert 10 < len(one["eval"]) < 30


@pytest.mark.parametrize(("fraction", "side"), [(0.000001, "eval"), (0.999999, "train")])
def test_an_empty_side_is_an_error(tmp_path, tokenizer, fraction, side):
    with pytest.raises(DataError, match=rf"data.eval_fraction.*none falls on the {side} side"):
        tokenize(config(tmp_path / "a.jsonl", sums(5), eval_fraction=fraction), tokenizer, tmp_path / "out")


def test_shards_open_with_datasets_and_pyarrow(tmp_path, tokenizer):
    import datasets

    tokenize(config(tmp_path / "a.jsonl", sums(30), shard_rows=10), tokenizer, tmp_path / "out")
    shards = sorted((tmp_path / "out" / "train").iterdir())
    assert [shard.name for shard in shards] == ["shard-00000.arrow", "shard-00001.arrow", "shard-00002.arrow"]
    for shard in shards:
        before = pa.total_allocated_bytes()
        table = pa.ipc.open_stream(pa.memory_map(str(shard))).read_all()
        assert pa.total_allocated_bytes() == before  # mapped, not copied
        opened = datasets.Dataset.from_file(str(shard))
        assert opened[0]["input_ids"] == table["input_ids"][0].as_py()
        assert table["question"].to_pylist() == opened["question"][:]


def test_nothing_superfluous_is_left_and_equal_inputs_give_equal_bytes(tmp_path, tokenizer):
    settings = config(tmp_path / "a.jsonl", sums(30), shard_rows=10)
    tokenize(settings, tokenizer, tmp_path / "one")
    first = tree(tmp_path / "one")
    assert {name.split("/")[0] for name in first} == {"train", "eval", "tokenizer", "stats.json"}
    assert not (tmp_path / "one" / "blocks").exists()
    assert not any(str(tmp_path).encode() in content for content in first.values())
    other = tmp_path / "two"
    (other / "train").mkdir(parents=True)
    for stray in ("shard-00007.arrow", ".shard-00000.arrow.tmp"):
        (other / "train" / stray).write_bytes(b"of an earlier try")
    tokenize(settings, tokenizer, other)
    assert tree(other) == first


def test_reasoning_gym_prompts_keep_what_the_verifier_needs(tmp_path, tokenizer):
    settings = DataConfig(
        source={"kind": "reasoning_gym", "dataset": "chain_sum", "size": 12}, eval_fraction=0.5, suffix=" Number only."
    )
    tokenize(settings, tokenizer, tmp_path / "out")
    for prompt in both(tmp_path / "out"):
        assert prompt.data_source == "chain_sum"
        assert prompt.question == prompt.extra_info["entry"]["question"] + " Number only."
        assert isinstance(prompt.extra_info["metadata"]["difficulty"]["num_terms"], tuple)


def test_as_many_rows_as_are_encoded_together_and_more(tmp_path, tokenizer, monkeypatch):
    """Each row keeps its own ids, whichever others it is encoded with; rows that are left out between them shift nothing."""
    monkeypatch.setattr("rl_core.data.tokenize._TOGETHER", 3)
    for count in (3, 6, 7):
        rows = [row for number in range(count) for row in ({"prompt": f"{number}+1=", "answer": str(number)}, {"prompt": 5})]
        stats = tokenize(config(tmp_path / "a.jsonl", rows, max_dropped_share=0.6), tokenizer, tmp_path / f"out{count}")
        assert (stats["rows"], stats["dropped"]["bad_row"]["rows"]) == (2 * count, count)
        found = {prompt.ground_truth: prompt for prompt in both(tmp_path / f"out{count}")}
        assert {number: prompt.input_ids for number, prompt in found.items()} == {
            str(number): [U, *ids(f"{number}+1="), END, A] for number in range(count)
        }


def test_a_tokenizer_with_code_of_its_own_is_asked(tmp_path, tokenizer):
    """What it adds to what the library under it computes is in the ids."""

    class Own(type(tokenizer)):
        def __call__(self, text, **settings):
            encoding = super().__call__(text, **settings)
            encoding["input_ids"] = [[*row, UNK] for row in encoding["input_ids"]]
            return encoding

    tokenizer.__class__ = Own
    tokenize(config(tmp_path / "a.jsonl", sums(8)), tokenizer, tmp_path / "out")
    assert [prompt.input_ids[-2:] for prompt in both(tmp_path / "out")] == [[A, UNK]] * 8


def test_what_is_left_of_a_cut_prompt_is_its_text(tmp_path, tokenizer):
    tokenize(config(tmp_path / "a.jsonl", sums(8), max_prompt_length=3, truncation="left"), tokenizer, tmp_path / "out")
    assert {prompt.text for prompt in both(tmp_path / "out")} == {"=<end><a>"}
