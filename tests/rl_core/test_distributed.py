"""How ranks join, what each learns when they cannot, and that no process group waits longer than it was told.

Run as a program, this file is one rank: `python -m tests.rl_core.test_distributed MODE`.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from rl_core import stall
from rl_core.config.trainer import LaunchConfig
from rl_core.distributed import backend_of, joined, place, set_timeouts
from rl_core.entry import run_program
from rl_core.errors import ConfigError, LaunchError
from rl_core.preflight import Preflight, listed
from tests.pipeline import ROOT

LIMIT = 150


def timeouts() -> dict[str, float]:
    """Seconds of every process group that exists, read back from the backend."""
    groups = list(distributed_c10d._world.pg_map)
    return {group.group_desc: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def lives() -> None:
    """Rank 0 tells what it saw."""
    with joined(LaunchConfig(device="cpu", dist_timeout_s=77.0)) as world:
        seen = {"size": world.size, "sum": float(world.sum(torch.tensor(world.rank + 1.0))), "first": timeouts()}
        seen["any"] = [world.any(world.rank == 1), world.any(False)]
        seen["gather"] = world.gather({"rank": world.rank})
        DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("replicate", "shard"))
        late = dist.new_group([0, 1], group_desc="late")
        seen["before"] = timeouts()
        set_timeouts(99.0)
        seen["after"] = timeouts()
        set_timeouts(1.0)
        store = distributed_c10d._get_default_store()
        if world.is_main:
            try:
                dist.all_reduce(torch.ones(1), group=late)
            except RuntimeError as error:
                seen["error"] = str(error)
            print(json.dumps(seen), flush=True)
            store.set("over", "")
        else:
            store.wait(["over"], timedelta(seconds=LIMIT))
        os._exit(0)  # the groups are broken


def dies() -> None:
    with joined(LaunchConfig(device="cpu")) as world, stall.phase("update_actor", 12):
        if world.rank == 1:
            os._exit(9)
        world.sum(torch.ones(1))


def arrives_alone() -> None:
    with joined(LaunchConfig(device="cpu", preflight_timeout_s=1.0)):
        raise AssertionError


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start(mode: str, rank: int, port: int, size: int = 2) -> "subprocess.Popen[str]":
    """A rank without torchrun: rank 0 serves the store."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rl_core.test_distributed", mode],
        cwd=ROOT, env=os.environ | own | meeting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_torchrun_with_a_master_port_and_every_timeout_read_back():
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    ended = subprocess.run(
        [sys.executable, *torchrun, "-m", "tests.rl_core.test_distributed", "lives"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert (seen["size"], seen["sum"], seen["any"]) == (2, 3.0, [True, False])
    assert seen["gather"] == [{"rank": 0}, {"rank": 1}]
    assert seen["first"] == {"default_pg": 77.0}
    assert seen["before"] == {"default_pg": 77.0, "mesh_shard": 1800.0, "late": 1800.0}  # torch's constant
    assert set(seen["after"].values()) == {99.0}
    assert "Timed out waiting 1000ms" in seen["error"]


def test_a_rank_whose_peer_died_says_where_it_was():
    port = free_port()
    survivor, dead = start("dies", 0, port), start("dies", 1, port)
    said, traceback = survivor.communicate(timeout=LIMIT)
    dead.communicate(timeout=LIMIT)
    assert survivor.returncode == 1
    assert "Traceback" in traceback
    place = f"ppoflow: rank 0 on {socket.gethostname()} in update_actor of step 12 ended by RuntimeError."
    assert said.startswith(f"{place} Its communication with the other ranks broke: one of them died")


def test_a_missing_rank_is_named():
    alone = start("arrives_alone", 0, free_port())
    said, _ = alone.communicate(timeout=LIMIT)
    host = socket.gethostname()
    assert alone.returncode == 2
    assert said.startswith(
        f"ppoflow: error: Rank 0 on {host}, backend gloo, before loading: 1 of 2 ranks did not arrive within 1 s: "
        f"rank 1 on {host}; there is rank 0 on {host}."
    )
    for hint in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_BACKEND=gloo", "firewall"):
        assert hint in said


def test_a_port_in_use(monkeypatch):
    with closing(socket.socket()) as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError, match=rf"port {port} is in use.*--master_port=.*--standalone"):
            Preflight(0, 2, "gloo", 5.0).connect()


def hangs() -> None:
    dist.HashStore().wait(["never"], timedelta(seconds=LIMIT))


def fails() -> None:
    raise RuntimeError("Connection refused\nfor 10.0.0.7")


@pytest.mark.parametrize(
    ("collective", "what"),
    [(hangs, "was not through within 0.1 s"), (fails, r"failed \(Connection refused\)")],
)  # fmt: skip
def test_a_first_collective_that_does_not_get_through(collective, what):
    store = dist.HashStore()
    store.set("arrived/1", "node-b")
    preflight = Preflight(0, 2, "cpu:gloo,cuda:nccl", 0.1)
    preflight.meet(store)
    with pytest.raises(LaunchError, match=rf"the first collective {what}, although .*; neither did rank 1 on node-b get through"):
        preflight.through(store, collective)


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_preflight_can_be_left_out(seconds):
    with joined(LaunchConfig(device="cpu", preflight_timeout_s=seconds)) as world:
        store = distributed_c10d._get_default_store().underlying_store.underlying_store
        assert (world.rank, world.size) == (0, 1)
        assert store.check(["preflight/arrived/0"]) == (seconds > 0)


@pytest.mark.parametrize(
    ("launch", "device", "variable", "backend"),
    [
        ({}, "cpu", None, "gloo"),
        ({}, "cuda", None, "cpu:gloo,cuda:nccl"),
        ({}, "cuda", "gloo", "gloo"),
        ({}, "cuda", "NCCL", "cpu:gloo,cuda:nccl"),
        ({}, "cpu", "", "gloo"),
        ({"dist_backend": "gloo"}, "cuda", "nccl", "gloo"),  # the configuration is nearer than the environment
        ({"dist_backend": "nccl"}, "cuda", "gloo", "cpu:gloo,cuda:nccl"),
    ],
)
def test_backend(launch, device, variable, backend):
    environment = {} if variable is None else {"TORCH_DISTRIBUTED_BACKEND": variable}
    assert backend_of(LaunchConfig(**launch), device, environment) == backend


@pytest.mark.parametrize(
    ("launch", "variable", "message"),
    [
        ({}, "mpi", "TORCH_DISTRIBUTED_BACKEND = mpi: it can be nccl or gloo"),
        ({}, "nccl", "TORCH_DISTRIBUTED_BACKEND = nccl needs GPUs"),
        ({"dist_backend": "nccl"}, "gloo", "launch.dist_backend = nccl needs GPUs"),
    ],
)
def test_backend_that_cannot_be(launch, variable, message):
    with pytest.raises(ConfigError, match=message):
        backend_of(LaunchConfig(**launch), "cpu", {"TORCH_DISTRIBUTED_BACKEND": variable})


def test_place_among_the_ranks():
    torchrun = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
    assert place(torchrun) == (3, 4)
    assert place({}) == place({"SLURM_NTASKS": "4"}) == place({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == (0, 1)
    with pytest.raises(ConfigError, match=r"no RANK, MASTER_PORT\. Start the ranks with torchrun"):
        place({**torchrun, "RANK": "", "MASTER_PORT": ""})
    with pytest.raises(ConfigError, match="srun started 4 programs that know nothing of each other"):
        place({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"})


def test_listed():
    assert (listed([3]), listed([5, 0, 1, 2]), listed([0, 2])) == ("rank 3", "ranks 0-2, 5", "ranks 0, 2")


if __name__ == "__main__":
    run_program(lambda arguments: {"lives": lives, "dies": dies, "arrives_alone": arrives_alone}[arguments[0]]())
