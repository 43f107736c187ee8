"""`make servers` on free ports, as a process that can be killed and started again, and a shell with the lines that it prints."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.pipeline import ROOT, environment


class Servers:
    """A Prefect and an MLflow server over `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
        self._process: subprocess.Popen[str] | None = None
        self.environment: dict[str, str] = {}

    def start(self) -> None:
        """Return when both answer; `environment` is that of a shell that uses them."""
        self._process = subprocess.Popen(
            [sys.executable, "infra/servers.py", *self._ports],
            cwd=ROOT, env=environment(self.home), stdout=subprocess.PIPE, start_new_session=True, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        exports = {}
        for line in self._process.stdout:
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                exports[name] = "".join(shlex.split(value))
            if line.startswith("Ctrl-C"):
                break
        assert exports, "the servers did not start"
        self.environment = environment(self.home, **exports)

    def kill(self) -> None:
        """At once, with all that they have started."""
        assert self._process is not None
        parts = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for part in parts:
            part.kill()
        psutil.wait_procs(parts, timeout=10)
        self._process.wait()

    def stop(self) -> None:
        """As Ctrl-C does."""
        if self._process is not None and self._process.poll() is None:
            with stopped_at_the_end(self._process):
                pass


@contextmanager
def stopped_at_the_end(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    """SIGTERM on leaving, SIGKILL to its group if that does not help."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
