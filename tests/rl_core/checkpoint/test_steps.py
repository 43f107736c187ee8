"""Checkpoints of a run: committed or not there, verified, rotated; an error of one rank is everybody's."""

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_core.artifacts import open_artifact
from rl_core.checkpoint.steps import Checkpoints
from rl_core.errors import BrokenArtifact, ModelError, StoreError
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((50,), value), "step": torch.tensor(value)}


def saved(directory: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep)
    for step in steps:
        checkpoints.save(step, tensors(step), {"cursor": 10 * step}, "key")
    return checkpoints


def test_save_and_load(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", 4)
    artifact = Checkpoints(tmp_path / "c", 2).latest()
    assert artifact is not None
    assert artifact.path == tmp_path / "c/step_000004"
    assert (artifact.key, artifact.results) == ("key", {"step": 4})
    read = tensors(0)
    assert checkpoints.load(artifact, read) == {"cursor": 40}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors(4).items())
    with pytest.raises(ModelError, match="1 missing: b"):
        checkpoints.load(artifact, {"a": torch.zeros(50), "step": torch.tensor(0.0), "b": torch.zeros(1)})


def test_nothing_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", 2)
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []


@pytest.mark.parametrize(("keep", "left"), [(0, [4, 5]), (1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_rotation_keeps_the_newest_and_never_fewer_than_two(tmp_path: Path, keep: int, left: list[int]) -> None:
    assert saved(tmp_path / "c", 1, 2, 3, 4, 5, keep=keep).steps() == left
    assert {path.name for path in (tmp_path / "c").iterdir()} == {f"step_{step:06d}" for step in left}


def test_rotation_scans_the_disk_after_a_restart(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2, 3, keep=5)
    assert saved(tmp_path / "c", 4, keep=2).steps() == [3, 4]


def test_what_a_kill_between_commit_and_rotation_left_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, 2, 3, keep=5)  # as if the rotation to two had not come to pass
    latest = Checkpoints(tmp_path / "c", 2).latest()
    assert latest is not None
    assert latest.path.name == "step_000003"
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step_000002", "step_000003"}


def damage(path: Path, how: str) -> None:
    shard = next((path / "tensors").glob("*.distcp"))
    if how == "flipped byte":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif how == "missing file":
        shard.unlink()
    else:
        (path / "manifest.json").unlink()


@pytest.mark.parametrize("how", ["flipped byte", "missing file", "no manifest"])
def test_a_broken_one_is_set_aside_and_the_previous_used(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = saved(tmp_path / "c", 1, 2)
    damage(checkpoints.path(2), how)
    with caplog.at_level(logging.WARNING):
        artifact = checkpoints.latest()
    assert artifact is not None
    assert artifact.path == checkpoints.path(1)
    assert "step_000002" in caplog.text
    assert checkpoints.steps() == [1]
    assert list((tmp_path / "c").glob(".step_000002.broken-*"))
    checkpoints.save(2, tensors(2), {}, "key")  # its place is free again
    assert checkpoints.steps() == [1, 2]


def test_of_broken_ones_the_latest_is_kept_until_it_is_old(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "c", 1, 2, 3)

    def broken() -> set[str]:
        return {path.name for path in (tmp_path / "c").glob(".*")}

    for step in checkpoints.steps():
        damage(checkpoints.path(step), "no manifest")
    with pytest.raises(BrokenArtifact):
        open_artifact(checkpoints.path(2))
    with pytest.raises(StoreError, match=r"none of the run's checkpoints is whole.* \.step_000002\.broken-0.*--fresh"):
        checkpoints.latest()
    with pytest.raises(StoreError, match="none of the run's checkpoints is whole"):
        checkpoints.latest()  # nor does it start at step 0 when it is asked again
    assert broken() == {".step_000002.broken-0", ".step_000003.broken-0"}
    saved(tmp_path / "c", 1)
    assert broken() == {".step_000003.broken-0"}
    saved(tmp_path / "c", 2, 3)
    damage(checkpoints.path(3), "no manifest")
    checkpoints.latest()
    assert broken() == {".step_000003.broken-0", ".step_000003.broken-1"}
    saved(tmp_path / "c", 3, 4)
    assert broken() == {".step_000003.broken-1"}
    saved(tmp_path / "c", 5)
    assert broken() == set()


def test_a_crash_before_the_rename_leaves_the_previous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path / "c", 1)

    rename = os.rename

    def crash(source: Path, target: Path) -> None:
        if target == checkpoints.path(2):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, tensors(2), {}, "key")
    assert (tmp_path / "c/.step_000002.partial/manifest.json").exists()
    artifact = Checkpoints(tmp_path / "c", 2).latest()
    assert artifact is not None
    assert artifact.path == checkpoints.path(1)
    saved(tmp_path / "c", 3)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step_000001", "step_000003"}


def several_ranks(rank: int, directory: Path) -> list[object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    checkpoints = Checkpoints(directory, 2)
    whole = torch.arange(9.0)
    first = checkpoints.save(1, {"a": distribute_tensor(whole, mesh, [Shard(0)])}, {"n": 1}, "key")
    checkpoints.save(2, {"a": distribute_tensor(whole + 1, mesh, [Shard(0)])}, {"n": 2}, "key")
    if rank == 0:
        damage(checkpoints.path(2), "flipped byte")
    dist.barrier()
    latest = checkpoints.latest()
    assert latest is not None
    read = {"a": distribute_tensor(torch.zeros(9), mesh, [Shard(0)])}
    state = checkpoints.load(latest, read)

    # Rank 1 cannot write its tensors: both ranks hear of it, and what was there stays.
    class Unwritable(torch.Tensor):
        def detach(self) -> torch.Tensor:
            raise OSError("the disk is full")

    bad = torch.zeros(3).as_subclass(Unwritable) if rank == 1 else torch.zeros(3)
    reason = ""
    try:
        checkpoints.save(3, {"a": distribute_tensor(whole, mesh, [Shard(0)]), f"b{rank}": bad}, {}, "key")
    except StoreError as error:
        reason = str(error)
    return [first.path.name, latest.path.name, state, read["a"].full_tensor().tolist(), reason, checkpoints.steps()]


def test_several_ranks(tmp_path: Path) -> None:
    for name, latest, state, read, reason, steps in run_ranks(several_ranks, 2, tmp_path / "c"):
        assert (name, latest, state) == ("step_000001", "step_000001", {"n": 1})
        assert read == list(range(9))
        assert "the disk is full" in reason
        assert steps == [1]
