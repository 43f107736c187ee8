"""Tensor directories: any number of ranks to any other, and nothing damaged, planted or of another model is read."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from rl_core.checkpoint.dcp import load_tensors, save_tensors, stored_tensors
from rl_core.errors import BrokenArtifact, ModelError, StoreError
from tests.ranks import run_ranks


def whole() -> dict[str, torch.Tensor]:
    """Tensors whose rows do not divide evenly; one has a single row, one is a number."""
    return {
        "weight": torch.arange(21.0).reshape(7, 3), "head": torch.arange(5.0).reshape(1, 5),
        "half": torch.arange(8, dtype=torch.bfloat16), "step": torch.tensor(4.0),
    }  # fmt: skip


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor for name, tensor in tensors.items()}


def save(rank: int, directories: list[Path]) -> None:
    for directory in directories:
        save_tensors(sharded(whole()), directory)


def load(rank: int, directory: Path) -> dict[str, torch.Tensor]:
    tensors = sharded({name: torch.zeros_like(tensor) for name, tensor in whole().items()})
    load_tensors(tensors, directory)
    return {name: tensor.full_tensor() if tensor.dim() else tensor for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories of the same content, written by two ranks."""
    root = tmp_path_factory.mktemp("dcp")
    run_ranks(save, 2, [root / "a", root / "b"])
    return [root / "a", root / "b"]


def test_two_ranks_write_three_read(saved: list[Path]) -> None:
    for loaded in run_ranks(load, 3, saved[0]):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in whole().items())


def test_two_ranks_write_one_process_reads(saved: list[Path]) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    load_tensors(tensors, saved[0])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in whole().items())
    assert {name: list(entry.size) for name, entry in stored_tensors(saved[0]).items()} == {
        name: list(tensor.shape) for name, tensor in whole().items()
    }


def test_equal_tensors_give_equal_files(saved: list[Path]) -> None:
    files = [{path.name: path.read_bytes() for path in directory.iterdir()} for directory in saved]
    assert files[0] == files[1]
    assert len(files[0]) == 3


def test_files_are_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.checkpoint.writer.FILE_BYTES", 100)
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(10)}  # 40 bytes each
    save_tensors(tensors, tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 4
    read = {name: torch.zeros(10) for name in tensors}
    load_tensors(read, tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)}, r"1 missing: c"),
        ({"a": torch.zeros(2, 3)}, r"1 superfluous: b"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(4)}, r"1 of another shape: a \[2, 3\] instead of \[3, 2\]"),
        ({"a": torch.zeros(2, 3).double(), "b": torch.zeros(4)}, r"1 of another type: a torch.float32 instead of torch.float64"),
        ({f"x{i:02}": torch.zeros(1) for i in range(12)}, r"12 missing: x00, .*x09; 2 superfluous"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, wanted: dict[str, torch.Tensor], message: str) -> None:
    save_tensors({"a": torch.ones(2, 3), "b": torch.ones(4)}, tmp_path / "t")
    with pytest.raises(ModelError, match=message):
        load_tensors(wanted, tmp_path / "t")
    assert not any(tensor.any() for tensor in wanted.values())


def test_a_part_and_another_type_on_request(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(2), "b": torch.ones(4)}, tmp_path / "t")
    a = torch.zeros(2, dtype=torch.float64)
    load_tensors({"a": a}, tmp_path / "t", strict=False, cast=True)
    assert a.tolist() == [1.0, 1.0]


class Planted:
    """Pickles as a call of os.mkdir."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_planted_pickle_is_not_run(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(2)}, tmp_path / "t")
    metadata: Metadata = pickle.loads((tmp_path / "t/.metadata").read_bytes())
    metadata.planner_data = Planted(str(tmp_path / "ran"))
    (tmp_path / "t/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BrokenArtifact, match=r"names posix\.mkdir"):
        load_tensors({"a": torch.zeros(2)}, tmp_path / "t")
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "t/.metadata").read_bytes())
    assert (tmp_path / "ran").exists()  # it would have


def test_bytes_entries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="only tensors"):
        save_tensors({"a": "text"}, tmp_path / "t")  # type: ignore[dict-item]
    dcp.save({"a": torch.ones(2), "b": io.BytesIO(b"anything")}, checkpoint_id=tmp_path / "u", no_dist=True)
    with pytest.raises(BrokenArtifact, match="b is not a tensor"):
        load_tensors({"a": torch.zeros(2)}, tmp_path / "u", strict=False)


def test_files_outside_of_the_directory_are_not_read(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(2)}, tmp_path / "t")
    metadata: Metadata = pickle.loads((tmp_path / "t/.metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../t/__0_0.distcp"
    (tmp_path / "t/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BrokenArtifact, match="outside"):
        load_tensors({"a": torch.zeros(2)}, tmp_path / "t")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_missing_and_cut_files(tmp_path: Path, name: str) -> None:
    save_tensors({"a": torch.ones(1000)}, tmp_path / "t")
    content = (tmp_path / "t" / name).read_bytes()
    (tmp_path / "t" / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError):
        load_tensors({"a": torch.zeros(1000)}, tmp_path / "t")
    (tmp_path / "t" / name).unlink()
    with pytest.raises(BrokenArtifact):
        load_tensors({"a": torch.zeros(1000)}, tmp_path / "t")
