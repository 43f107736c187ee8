"""What is exported is the model that its config.json describes, or nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.dcp import load_tensors, save_tensors, stored_tensors
from rl_core.checkpoint.export import export_policy
from rl_core.errors import ModelError
from rl_core.models.source import ModelSource, load_tokenizer
from tests.tiny import tiny_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    source = ModelSource(tiny_model(root / "source"))
    convert(source, load_tokenizer(source), root / "base")
    return root / "base"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("actor.model.norm.weight"), "1 missing: actor.model.norm.weight"),
        (lambda tensors: tensors.update({"actor.lm_head.weight": torch.ones(101, 32)}), "1 superfluous: actor.lm_head.weight"),
        (
            lambda tensors: tensors.update({"actor.model.norm.weight": torch.ones(31)}),
            r"model.norm.weight \[31\] instead of \[32\]",
        ),
        (lambda tensors: tensors.update({"actor.model.norm.lora_A.weight": torch.ones(2, 3)}), "superfluous.*lora_A"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("actor.")],
            "no tensor whose name starts",
        ),
    ],
)
def test_tensors_of_another_model_are_refused_before_anything_is_written(
    base: Path, tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    whole = {name: torch.empty(entry.size) for name, entry in stored_tensors(base / "weights").items()}
    load_tensors(whole, base / "weights")
    tensors = {f"actor.{name}": tensor for name, tensor in whole.items()} | {"critic.value_head.bias": torch.zeros(1)}
    change(tensors)
    save_tensors(tensors, tmp_path / "checkpoint")
    with pytest.raises(ModelError, match=message):
        export_policy(tmp_path / "checkpoint", "actor.", base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
