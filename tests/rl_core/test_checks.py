"""What is refused before models load."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core.checks import check_token_ids
from rl_core.config import parse_config
from rl_core.data.prompts import Prompts
from rl_core.data.shards import Blocks
from rl_core.errors import ModelError
from tests.tiny import tiny_model


def prompts(directory: Path, *rows: list[int]) -> Prompts:
    fields = {"prompt_id": "0" * 64, "text": "", "question": "", "ground_truth": None, "data_source": "d", "extra_info": "{}"}
    Blocks(directory, "plan").write(0, {"train": [{**fields, "input_ids": row} for row in rows], "eval": []}, {})
    return Prompts(directory, "train")


def test_prompts_with_ids_that_the_embedding_lacks_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    base: Any = SimpleNamespace(path=model)
    config = parse_config({"model": {"name_or_path": str(model)}, "reward": {"kind": "math"}})
    rows = 102  # of the tiny model's embedding
    check_token_ids(config, [prompts(tmp_path / "fits", [3, rows - 1], [])], base)
    beyond = prompts(tmp_path / "beyond", [1, 2], [rows, 2])
    assert beyond.greatest_id() == rows
    with pytest.raises(ModelError, match=rf"ids up to {rows}, but the model's embedding has only {rows} rows.*resize_token_emb"):
        check_token_ids(config, [prompts(tmp_path / "fits", [0]), beyond], base)
