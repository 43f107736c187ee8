"""Two nodes on one machine: two network namespaces, joined by a cable, with host names and a disk that they share."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rl_core.artifacts import open_artifact
from tests.pipeline import ROOT, environment, tiny_settings

NET = Path("/etc/netns")
"""`ip netns exec NAME` shows a program what lies under /etc/netns/NAME instead of the same under /etc."""


class Nodes:
    """Two namespaces whose names and host names are the same."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = [f"ppoflow-{os.getpid()}-{letter}" for letter in "ab"]
        self.addresses = dict(zip(self.names, ("10.231.7.1", "10.231.7.2"), strict=True))

    def connect(self) -> None:
        """Skips the test where namespaces may not be made."""
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
            pytest.skip("network namespaces need root, iproute2 and util-linux")
        try:
            for name in self.names:
                self._ip("netns", "add", name)
            first, second = self.names
            self._ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, address in self.addresses.items():
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                self._ip("-n", name, "link", "set", device, "up")
        self.call_hosts()

    def call_hosts(self, own: str | None = None) -> None:
        """What the host names stand for on each node: their addresses, but `own` for the node's own one."""
        for here in self.names:
            addresses = self.addresses | ({here: own} if own else {})
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
            (NET / here).mkdir(parents=True, exist_ok=True)
            (NET / here / "hosts").write_text("\n".join(lines) + "\n")
            (NET / here / "resolv.conf").write_text("")  # nobody else is asked

    def disconnect(self) -> None:
        """End what still runs there, and remove them."""
        for name in self.names:
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            if left:
                subprocess.run(["kill", "-9", *left], check=False)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(NET / name, ignore_errors=True)

    def submit(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run `infra/slurm/train.sbatch` as SLURM does for a job on both nodes; what SLURM's programs do is done here."""
        programs = self.directory / "programs"
        programs.mkdir(exist_ok=True)
        node = 'ip netns exec "$node" unshare --uts bash -c \'hostname "$0"; exec "$@"\' "$node" "$@"'
        bodies = {
            "scontrol": f"printf '%s\\n' {' '.join(self.names)}",
            "srun": f"shift\nfor node in {' '.join(self.names)}; do {node} & jobs+=($!); done\n"
            'for job in "${jobs[@]}"; do wait "$job" || exit; done',
            "python": f'exec {sys.executable} "$@"',
            "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        }
        for name, body in bodies.items():
            (programs / name).write_text(f"#!/bin/bash\n{body}\n")
            (programs / name).chmod(0o755)
        batch = {
            "SLURM_SUBMIT_DIR": str(self.directory), "SLURM_JOB_NODELIST": ",".join(self.names), "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2",
            "PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = ["bash", ROOT / "infra/slurm/train.sbatch", *arguments]
        own = environment(self.directory / "home", **batch)
        return subprocess.run(command, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        made.connect()
        yield made
    finally:
        made.disconnect()


def test_one_policy_is_trained_on_two_nodes(nodes, tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(tiny_settings(tmp_path)))
    ended = nodes.submit(config, tmp_path / "run", "--set", "trainer.max_steps=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr  # srun's: that of the first node that failed
    assert open_artifact(tmp_path / "run/policy").results == {"step": 1}
    state = json.loads((tmp_path / "run/checkpoints/step_000001/state.json").read_text())
    assert (state["step"], state["ranks"]) == (1, 2)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


def test_host_names_that_lead_back_to_the_host_itself(nodes, tmp_path):
    """As Debian's installer writes them into /etc/hosts: gloo then offers the others an address of its own loopback."""
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(tiny_settings(tmp_path) | {"launch": {"device": "cpu", "preflight_timeout_s": 5.0}}))
    nodes.call_hosts(own="127.0.1.1")
    ended = nodes.submit(config, tmp_path / "run")
    assert ended.returncode != 0
    said = [line for line in ended.stdout.splitlines() if line.startswith("ppoflow: error: ")]
    assert said, ended.stdout + ended.stderr
    assert "backend gloo, before loading: the first collective" in said[0]
    assert "GLOO_SOCKET_IFNAME=NAME" in said[0]
