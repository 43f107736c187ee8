"""Safetensors read in pieces."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_core.checkpoint.dcp import load_safetensors
from rl_core.errors import ModelError


def test_pieces_of_any_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.checkpoint.readers.PIECE_BYTES", 100)  # of 40 bytes a row: 2 rows, the last one alone
    stored = {"matrix": torch.randn(7, 10), "vector": torch.randn(33), "scalar": torch.tensor(3.0), "cube": torch.randn(3, 4, 5)}
    save_file({name: stored[name] for name in ("matrix", "scalar")}, tmp_path / "model-1.safetensors")
    save_file({name: stored[name] for name in ("vector", "cube")}, tmp_path / "model-2.safetensors")
    found = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in stored.items()}
    load_safetensors(found, tmp_path)
    for name, tensor in stored.items():
        assert torch.equal(found[name].float(), tensor)


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"matrix": torch.zeros(7, 10)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match="a safetensors file in it is damaged"):
        load_safetensors({"matrix": torch.zeros(7, 10)}, tmp_path)
