import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_core.config.trainer import LaunchConfig
from rl_core.errors import ConfigError
from tasks.devices import Share, check_device, gpu_count, rank_count, share_of_job, threads_per_rank

SLURM = Path(__file__).resolve().parents[2] / "infra/slurm"


@pytest.fixture
def eight(tmp_path, monkeypatch):
    """A host with eight GPUs and no tool to list them."""
    monkeypatch.setenv("PATH", "/nowhere")
    for index in range(8):
        (tmp_path / f"0000:{index:02x}:00.0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8), ("", 0), ("-1", 0), ("0", 1), ("3,1,2", 3), (" 0, 1", 2), ("0,-1,1", 1), ("0,8,1", 1),
        ("GPU-5a1c,GPU-77", 2), ("MIG-5a1c", 1), ("MIG-GPU-5a1c/1/0,MIG-GPU-5a1c/2/0", 2), ("NoDevFiles", 0),
    ],
)  # fmt: skip
def test_gpu_count(eight, visible, count):
    assert gpu_count({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, eight) == count


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NPROCS": "4"}, None),  # tasks are not GPUs
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS": "16"}, Share("SLURM_GPUS_ON_NODE", 4)),
        ({"SLURM_GPUS_ON_NODE": "gpu:a100:4"}, Share("SLURM_GPUS_ON_NODE", 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, Share("SLURM_GPUS_PER_NODE", 4)),
        ({"SLURM_GPUS_PER_NODE": "volta:3,kepler:1"}, Share("SLURM_GPUS_PER_NODE", 4)),
        ({"SLURM_JOB_GPUS": "0,1"}, Share("SLURM_JOB_GPUS", 2, ("0", "1"))),
        ({"SLURM_JOB_GPUS": "0-2,5"}, Share("SLURM_JOB_GPUS", 4, ("0", "1", "2", "5"))),
        ({"SLURM_JOB_GPUS": "gpu:2"}, Share("SLURM_JOB_GPUS", 2)),
        ({"SLURM_STEP_GPUS": "gpu:a100:4"}, Share("SLURM_STEP_GPUS", 4)),
        ({"SLURM_STEP_GPUS": "7", "SLURM_JOB_GPUS": "4,5,6,7", "SLURM_GPUS_PER_NODE": "4"}, Share("SLURM_STEP_GPUS", 1, ("7",))),
        ({"SLURM_STEP_GPUS": "", "SLURM_GPUS_ON_NODE": "2"}, Share("SLURM_GPUS_ON_NODE", 2)),
        ({"PBS_NGPUS": "4"}, Share("PBS_NGPUS", 4)),
    ],
)  # fmt: skip
def test_share_of_a_batch_job(environment, share):
    assert share_of_job(environment) == share


def test_share_in_a_file_of_torque(tmp_path):
    (tmp_path / "gpus").write_text("node01-gpu3\nnode01-gpu1\nnode02-gpu0\n")
    environment = {"PBS_GPUFILE": str(tmp_path / "gpus"), "PBS_NGPUS": "8"}
    assert share_of_job(environment, "node01.cluster") == Share("PBS_GPUFILE", 2, ("3", "1"))
    assert share_of_job(environment, "node02") == Share("PBS_GPUFILE", 1, ("0",))
    assert share_of_job(environment, "login") == Share("PBS_NGPUS", 8)
    with pytest.raises(ConfigError, match=r"PBS_GPUFILE = .*none cannot be read"):
        share_of_job({"PBS_GPUFILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"SLURM_STEP_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"}, 2),
        ({"SLURM_STEP_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),  # SLURM numbers them anew where it hides the others
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"SLURM_JOB_GPUS": "0,1"}, 2),
        ({"SLURM_JOB_GPUS": "8-15"}, 8),  # all that are shown are the job's
        ({"PBS_NGPUS": "16"}, 8),  # of two hosts
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
    ],
)
def test_no_more_ranks_than_the_job_has_gpus(eight, environment, count):
    assert gpu_count(environment, eight) == count


@pytest.mark.parametrize(
    ("environment", "mend"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0 1"}, "export CUDA_VISIBLE_DEVICES=0,1$"),  # what the article's sed makes of 0,1
        ({"CUDA_VISIBLE_DEVICES": "0 1, 2"}, "export CUDA_VISIBLE_DEVICES=0,1,2$"),
        ({"SLURM_STEP_GPUS": "0 1"}, "export SLURM_STEP_GPUS=0,1$"),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}, "hides the 2 GPU.* Unset it"),  # … outside of srun
        ({"SLURM_JOB_GPUS": "4,5"}, "export CUDA_VISIBLE_DEVICES=4,5$"),  # else another job's 0 and 1
        ({"SLURM_GPUS_ON_NODE": "many"}, "SLURM_GPUS_ON_NODE = 'many' is not a number of GPUs. State launch.nproc_per_node"),
    ],
)
def test_an_environment_that_would_take_the_wrong_gpus_is_refused(eight, environment, mend):
    with pytest.raises(ConfigError, match=mend):
        gpu_count(environment, eight)


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


@pytest.mark.parametrize("name", ["train.sbatch", "train.pbs"])
def test_batch_scripts_are_well_formed(name):
    subprocess.run(["bash", "-n", SLURM / name], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, "-s", "bash", SLURM / name], check=True)


@pytest.mark.parametrize(
    ("script", "arguments", "environment"),
    [
        (
            "train.sbatch", ["my config.yaml", "out", "--set", "a=b c"],
            {"SLURM_SUBMIT_DIR": ".", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "123456",
             "SLURM_CPUS_PER_TASK": "4"},
        ),
        (
            "train.pbs", [],
            {"PBS_O_WORKDIR": ".", "PBS_NODEFILE": "nodes", "PBS_JOBID": "123456.server", "CONFIG": "my config.yaml",
             "OUTPUT": "out"},
        ),
    ],
)  # fmt: skip
def test_batch_scripts_start_one_torchrun_a_node(tmp_path, script, arguments, environment):
    """The programs of the batch system and torchrun stand aside and show what they are called with."""
    programs = {
        "scontrol": 'test "$3" = "n[7-8]" && printf "n7\\nn8\\n"',
        "srun": 'shift; "$@"; "$@"',
        "pbsdsh": 'shift; cd /; env -i "$@"; env -i "$@"',
        "torchrun": 'printf "%s|" "$@"; echo',
        "python": f'PYTHONPATH={SLURM.parents[1]} exec {sys.executable} "$@"',
    }
    for name, body in programs.items():
        (tmp_path / ".venv/bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv/bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / "nodes").write_text("n7\nn8\n")
    here = {name: str(tmp_path / value) if value in (".", "nodes") else value for name, value in environment.items()}
    path = {"PATH": f"{tmp_path / '.venv/bin'}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "-1"}
    said = subprocess.run(
        ["bash", SLURM / script, *arguments], env=path | here, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    expected = [
        "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-id=123456",
        "--rdzv-endpoint=n7:23456", "-m", "rl_core.train", "--config_path", "my config.yaml", "--output_dir", "out",
        *arguments[2:],
    ]  # fmt: skip
    assert said.stdout.splitlines() == ["|".join(expected) + "|"] * 2


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_prepared() -> None:
    check_device(LaunchConfig(device="cpu"))
    check_device(LaunchConfig(device="auto"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"launch\.device = cuda, but torch sees no GPU"):
            check_device(LaunchConfig(device="cuda"))
