"""A tokenization killed in the middle goes on with the shards that it finished."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rl_core.config.data import DataConfig
from rl_core.data.shards import SCHEMA, Blocks
from rl_core.data.tokenize import tokenize
from tests.tiny import tiny_tokenizer

ROWS, SHARD_ROWS = 3000, 50
CHILD = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from rl_core.config.data import DataConfig
from rl_core.data.tokenize import tokenize
config, tokenizer, out = sys.argv[1:]
tokenize(DataConfig.model_validate_json(config), AutoTokenizer.from_pretrained(tokenizer), Path(out))
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def inputs(directory: Path) -> tuple[DataConfig, Path]:
    path = directory / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(ROWS)), encoding="utf-8"
    )
    config = DataConfig(source={"kind": "files", "path": str(path)}, shard_rows=SHARD_ROWS)
    return config, tiny_tokenizer(directory / "tokenizer")


def kill_after_first_block(config: DataConfig, tokenizer: Path, out: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, config.model_dump_json(), str(tokenizer), str(out)])
    deadline = time.monotonic() + 60
    while not (out / "blocks" / "00000.json").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_resume_after_kill(tmp_path):
    config, files = inputs(tmp_path)
    out = tmp_path / "out"
    kill_after_first_block(config, files, out)
    assert not (out / "stats.json").exists()
    notes = [json.loads(path.read_text()) for path in (out / "blocks").glob("*.json")]
    finished = {name: os.stat(out / name) for note in notes for name in note["shards"]}
    assert 0 < len(notes) < ROWS // SHARD_ROWS
    tokenize(config, AutoTokenizer.from_pretrained(files), out)
    for name, before in finished.items():
        after = os.stat(out / name)
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), f"{name} was written again"
    tokenize(config, AutoTokenizer.from_pretrained(files), tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


def finished_blocks(directory: Path) -> list[dict | None]:
    return [Blocks(directory, "plan").finished(number) for number in range(3)]


@pytest.fixture
def three_blocks(tmp_path):
    row = dict.fromkeys(SCHEMA.names, "x") | {"input_ids": [1, 2]}
    blocks = Blocks(tmp_path / "out", "plan")
    for number in range(3):
        blocks.write(number, {"train": [row] * 5, "eval": [row]}, {"number": number})
    assert None not in finished_blocks(tmp_path / "out")
    return tmp_path / "out"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: flip(out / "eval" / "shard-00001.arrow"),
        lambda out: (out / "train" / "shard-00001.arrow").unlink(),
        lambda out: (out / "blocks" / "00001.json").unlink(),
        lambda out: (out / "blocks" / "00001.json").write_bytes(b"\0" * 100),
    ],
)
def test_a_damaged_block_is_written_again(three_blocks, damage):
    damage(three_blocks)
    first, second, third = finished_blocks(three_blocks)
    assert (first["stats"], second, third["stats"]) == ({"number": 0}, None, {"number": 2})
    assert not list(three_blocks.glob("*/shard-00001.arrow"))


def test_blocks_of_another_plan_are_removed(three_blocks):
    assert Blocks(three_blocks, "other").finished(0) is None
    assert not [path for path in three_blocks.rglob("*") if path.is_file()]
