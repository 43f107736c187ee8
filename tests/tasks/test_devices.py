import os

import pytest

from rl_core.config.trainer import LaunchConfig
from tasks.devices import gpu_count, rank_count, threads_per_rank


@pytest.fixture
def eight(tmp_path):
    for index in range(8):
        (tmp_path / f"0000:{index:02x}:00.0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8), ("", 0), ("-1", 0), ("0", 1), ("3,1,2", 3), (" 0, 1", 2), ("0,-1,1", 1), ("0,8,1", 1),
        ("GPU-5a1c,GPU-77", 2), ("MIG-5a1c", 1), ("NoDevFiles", 0), ("0 1 2", 0),
    ],
)  # fmt: skip
def test_gpu_count(eight, visible, count):
    assert gpu_count({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, eight) == count


def test_gpu_count_without_a_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path / "none") == 0
    assert gpu_count({}, tmp_path / "none") == 0


def test_gpu_count_by_nvidia_smi(eight, tmp_path, monkeypatch):
    """A MIG slice listed below its GPU is no GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho '  MIG 1g.18gb (UUID: MIG-2)'\necho 'GPU 1: H200'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_count({}, eight) == 2  # not the host's eight


def test_rank_and_thread_counts(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert rank_count(LaunchConfig(device="cpu")) == 1
    assert rank_count(LaunchConfig(nproc_per_node=3)) == 3
    assert threads_per_rank(LaunchConfig(device="cpu")) == cores
    assert threads_per_rank(LaunchConfig(nproc_per_node=cores * 2)) == 1
    assert threads_per_rank(LaunchConfig(threads_per_rank=5)) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_per_rank(LaunchConfig(device="cpu")) == 7
