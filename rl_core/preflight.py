"""The ranks meet before anything loads, and soon say what keeps them apart: who did not come, or that no data passes."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from rl_core.errors import LaunchError

HINTS = (
    "Look first for an error of the other rank(s) in the log. Between hosts, name the network interface that connects them "
    "(`ip addr` lists them): export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME; ask whether a firewall lets all TCP ports "
    "through; export NCCL_DEBUG=INFO shows what NCCL tries, and TORCH_DISTRIBUTED_BACKEND=gloo (or launch.dist_backend: gloo) "
    "does without it. Where ranks only start slowly, raise launch.preflight_timeout_s."
)


class Preflight:
    """One rank's way into the world, all of it within `seconds`."""

    def __init__(self, rank: int, size: int, backend: str, seconds: float) -> None:
        self._rank, self._size, self._backend, self._seconds = rank, size, backend, seconds
        self._deadline = time.monotonic() + seconds
        self._hosts: dict[int, str] = {}

    def connect(self) -> dist.Store:
        """The store of the ranks: torchrun's, or one that rank 0 serves at MASTER_ADDR:MASTER_PORT.

        Raises:
            LaunchError: its port is taken, or it cannot be reached.
        """
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            return dist.TCPStore(
                host, port, is_master=serves, timeout=self._left(), wait_for_workers=False, multi_tenant=True, use_libuv=True
            )
        except RuntimeError as error:
            if "EADDRINUSE" in str(error):
                raise LaunchError(
                    f"Rank {self._rank} on {socket.gethostname()}: port {port} is in use on this host, so the ranks cannot meet "
                    "there. Give another one (torchrun --master_port=N, or MASTER_PORT), or on one host torchrun --standalone, "
                    "which finds a free one."
                ) from error
            raise self._failed(f"{host}:{port}, where the ranks meet, cannot be reached ({_first_line(error)})") from error

    def meet(self, store: dist.Store) -> None:
        """Wait until all ranks are there.

        Raises:
            LaunchError: some did not come; it names them.
        """
        store.set(f"arrived/{self._rank}", socket.gethostname())
        keys = [f"arrived/{rank}" for rank in range(self._size)]
        try:
            store.wait(keys, self._left())
        except RuntimeError as error:
            self._hosts = self._known(store)
            missing = [rank for rank in range(self._size) if rank not in self._hosts]
            raise self._failed(
                f"{len(missing)} of {self._size} ranks did not arrive within {self._seconds:g} s: {self._named(missing)}; there "
                f"{'is' if len(self._hosts) == 1 else 'are'} {self._named(self._hosts)}"
            ) from error
        self._hosts = self._known(store)

    def through(self, store: dist.Store, collective: Callable[[], None]) -> None:
        """Call `collective`, which may hang for good, in a thread; it stays behind if it does.

        Raises:
            LaunchError: it failed or was not through in time.
        """
        raised: list[Exception] = []
        ended = threading.Event()

        def run() -> None:
            try:
                collective()
            except Exception as error:  # noqa: BLE001 – raised by the caller
                raised.append(error)
            ended.set()

        threading.Thread(target=run, daemon=True, name="preflight").start()
        in_time = ended.wait(max(0.0, self._deadline - time.monotonic()))
        if in_time and not raised:
            store.set(f"through/{self._rank}", "")
            return
        others = [rank for rank in range(self._size) if rank != self._rank and not store.check([f"through/{rank}"])]
        what = f"failed ({_first_line(raised[0])})" if raised else f"was not through within {self._seconds:g} s"
        also = f"; neither did {self._named(others)} get through" if others else ""
        raise self._failed(f"the first collective {what}, although all {self._size} ranks are there{also}")

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.1, self._deadline - time.monotonic()))

    def _known(self, store: dist.Store) -> dict[int, str]:
        there = [rank for rank in range(self._size) if store.check([f"arrived/{rank}"])]
        return {rank: store.get(f"arrived/{rank}").decode() for rank in there}

    def _named(self, ranks: Iterable[int]) -> str:
        """Ranks by host. The host of one that never came is that of its neighbours under the same torchrun."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        neighbours = {rank // local: host for rank, host in self._hosts.items()}
        hosts: dict[str | None, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(self._hosts.get(rank, neighbours.get(rank // local)), []).append(rank)
        return ", ".join(f"{listed(there)}{f' on {host}' if host else ''}" for host, there in hosts.items())

    def _failed(self, what: str) -> LaunchError:
        return LaunchError(
            f"Rank {self._rank} on {socket.gethostname()}, backend {self._backend}, before loading: {what}. {HINTS}"
        )


def first_collective(device: torch.device) -> None:
    """An all-reduce on the CPU and, where there is one, on the GPU; waits for its end."""
    for place in {torch.device("cpu"), device}:
        one = torch.ones(1, device=place)
        dist.all_reduce(one)
        assert int(one) == dist.get_world_size()


def listed(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if one else 's'} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
