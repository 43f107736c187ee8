"""A Prefect server and an MLflow server on loopback, over `PPOFLOW_HOME`, until Ctrl-C: `make servers`.

Light settings: one MLflow worker without job runner, artifacts straight on the disk. Both use the databases that ppoflow
uses without servers, so earlier runs are there. An automation marks runs as crashed whose process died (`dead-runs.yaml`).
"""

import argparse
import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import FrameType
from typing import Any

from rl_core.home import home, writable
from tasks.environment import prepare
from tasks.mlflow_client import make_database

HOST = "127.0.0.1"
DEAD_RUNS = Path(__file__).with_name("dead-runs.yaml")
EXPORTED = (
    "PPOFLOW_HOME", "PREFECT_HOME", "PREFECT_API_URL", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "PREFECT_WORKER_QUERY_SECONDS",
    "MLFLOW_TRACKING_URI", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY",
)  # fmt: skip
"""What a shell sets to work against these servers with the same settings."""


def main() -> int:
    """Start both, say where they are, wait, stop both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    ports = parser.parse_args()
    for option, port in (("--prefect-port", ports.prefect_port), ("--mlflow-port", ports.mlflow_port)):
        if not _free(port):
            print(
                f"servers: port {port} is taken; choose another with {option} (make servers ARGS='{option} N').", file=sys.stderr
            )
            return 1
    _use(ports.prefect_port)
    signal.signal(signal.SIGTERM, _interrupt)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        servers += [_start_prefect(ports.prefect_port), _start_mlflow(ports.mlflow_port)]
        _wait_until_up(f"http://{HOST}:{ports.prefect_port}/api/health", servers)
        _wait_until_up(f"http://{HOST}:{ports.mlflow_port}/health", servers)
        asyncio.run(_apply_automation())
        os.environ["MLFLOW_TRACKING_URI"] = f"http://{HOST}:{ports.mlflow_port}"
        # MLflow opens on its pages for agents unless it is told that this is about training.
        training = f"http://{HOST}:{ports.mlflow_port}/#/experiments?workflowType=machine_learning"
        print(f"\nPrefect  http://{HOST}:{ports.prefect_port}\nMLflow   {training}\n\nIn another shell:")
        print("\n".join(f"export {name}={shlex.quote(os.environ[name])}" for name in EXPORTED), flush=True)
        print("\nCtrl-C stops both.", flush=True)
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
        print("servers: one of them ended; see its lines above.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(servers)


def _use(prefect_port: int) -> None:
    """Settings of both servers and of the client in this process."""
    writable(home())
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{prefect_port}/api"
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # the server stands over the database, not over another server
    prepare()
    writable(home() / "mlflow")


def _start_prefect(port: int) -> "subprocess.Popen[bytes]":
    return _start("prefect", "server", "start", "--host", HOST, "--port", str(port))


def _start_mlflow(port: int) -> "subprocess.Popen[bytes]":
    make_database()
    artifacts = str(home() / "mlflow" / "artifacts")
    return _start(
        "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1", "--backend-store-uri",
        os.environ["MLFLOW_TRACKING_URI"], "--no-serve-artifacts", "--default-artifact-root", artifacts,
    )  # fmt: skip


def _start(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """In a session of its own: Ctrl-C reaches this process, which stops the whole group."""
    return subprocess.Popen([str(Path(sys.executable).with_name(program)), *arguments], start_new_session=True)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _wait_until_up(url: str, servers: list[Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and all(server.poll() is None for server in servers):
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    sys.exit(f"servers: {url} did not answer within {seconds:.0f} s; see the lines above.")


async def _apply_automation() -> None:
    """Make the automation of dead-runs.yaml where there is none of its name."""
    import yaml
    from prefect.automations import Automation

    wanted = yaml.safe_load(DEAD_RUNS.read_text(encoding="utf-8"))
    try:
        await Automation.aread(name=wanted["name"])
    except ValueError:
        await Automation(**wanted).acreate()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stop(servers: list["subprocess.Popen[bytes]"]) -> None:
    """SIGTERM to each group, SIGKILL after 10 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for server in servers:
            try:
                os.killpg(server.pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while any(server.poll() is None for server in servers) and time.monotonic() < deadline:
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
