"""A save beside the training: what is saved is what was there when it was begun; one at a time; its errors are heard."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_core.checkpoint.saver import Saver
from rl_core.checkpoint.steps import Checkpoints
from rl_core.errors import StoreError
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


class Held(Checkpoints):
    """Checkpoints whose saves wait until they are let go, or fail."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, keep=5)
        self.go, self.error = threading.Event(), ""

    def save(self, *what: Any, **more: Any) -> Any:
        assert self.go.wait(60)
        if self.error:
            raise StoreError(self.error)
        return super().save(*what, **more)


def test_what_is_saved_is_what_there_was_at_the_begin(tmp_path: Path) -> None:
    checkpoints = Held(tmp_path / "c")
    saver, tensor = Saver(checkpoints, background=True), torch.arange(6.0)
    saver.begin(1, {"a": tensor}, {"n": 1}, "key")
    saver.wait_for_copy()
    tensor.zero_()
    assert checkpoints.steps() == [], "begin returns before anything is committed"
    checkpoints.go.set()
    saver.wait()
    artifact, read = checkpoints.latest(), torch.empty(6)
    assert artifact is not None
    assert checkpoints.load(artifact, {"a": read}) == {"n": 1}
    assert read.tolist() == list(range(6))


def test_one_at_a_time(tmp_path: Path) -> None:
    checkpoints = Held(tmp_path / "c")
    saver = Saver(checkpoints, background=True)
    saver.begin(1, {"a": torch.zeros(1)}, {}, "key")
    second = threading.Thread(target=lambda: saver.begin(2, {"a": torch.zeros(1)}, {}, "key"))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits for the first"
    checkpoints.go.set()
    second.join()
    assert 1 in checkpoints.steps()
    saver.wait()
    assert checkpoints.steps() == [1, 2]
    assert saver.lost_seconds() > 0.1
    assert saver.lost_seconds() == 0, "since it was last asked"


def test_a_failed_save_is_heard(tmp_path: Path) -> None:
    checkpoints = Held(tmp_path / "c")
    saver = Saver(checkpoints, background=True)
    checkpoints.error = "the disk is on fire"
    checkpoints.go.set()
    saver.begin(1, {"a": torch.zeros(1)}, {}, "key")
    with pytest.raises(StoreError, match="on fire"):
        saver.begin(2, {"a": torch.zeros(1)}, {}, "key")
    saver.begin(2, {"a": torch.zeros(1)}, {}, "key")
    with pytest.raises(StoreError, match="on fire"):
        saver.wait()
    saver.wait()
    assert not saver.failed


def test_without_a_thread_it_is_committed_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    Saver(checkpoints, background=False).begin(1, {"a": torch.zeros(1)}, {}, "key")
    assert checkpoints.steps() == [1]


def both_ways(rank: int, directory: Path) -> list[Any]:
    """The same tensors saved with and without a thread; then rank 1 cannot write."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    tensors = {"w": distribute_tensor(torch.arange(21.0).reshape(7, 3), mesh, [Shard(0)]), "step": torch.tensor(4.0)}
    digests = []
    for name, background in (("thread", True), ("none", False)):
        checkpoints = Checkpoints(directory / name, 2, process_group=dist.new_group(backend="gloo"))
        saver = Saver(checkpoints, background)
        saver.begin(1, tensors, {"n": 1}, "key")
        total = torch.ones(1)
        for _ in range(20):
            dist.all_reduce(total)  # the training's own collectives go on
        saver.wait()
        artifact = checkpoints.latest()
        assert artifact is not None
        digests.append(artifact.digest)

    def broken(*_: Any) -> None:
        raise OSError("rank 1's disk is gone")

    if rank == 1:
        import rl_core.checkpoint.writer as writer

        writer.digest_file = broken  # type: ignore[assignment]
    checkpoints = Checkpoints(directory / "thread", 2, process_group=dist.new_group(backend="gloo"))
    saver = Saver(checkpoints, True)
    saver.begin(2, tensors, {}, "key")
    try:
        saver.wait()
        said = ""
    except StoreError as error:
        said = str(error)
    return [digests, said, checkpoints.steps()]


def test_ranks_save_the_same_bits_with_a_thread_and_all_hear_of_a_failure(tmp_path: Path) -> None:
    for (threaded, plain), said, steps in run_ranks(both_ways, 2, tmp_path):
        assert threaded == plain
        assert "rank 1's disk is gone" in said
        assert steps == [1]
