"""Prefect's API for the time of one command, where no server is configured.

Prefect would start a temporary server by itself, in the terminal's process group and without a tie to its parent: a Ctrl-C
ends it before the flow can say how it ended, and a flow that is killed leaves it behind for ever. This one has a session of
its own and dies with its parent. It listens on a socket that is open before it starts, so that no port is raced for.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_core.errors import StoreError
from rl_core.home import home, writable
from rl_core.process import PARENT, die_with_parent

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
STARTUP_SECONDS = 120
"""The first start makes the database, which takes 20 s on a small machine."""


@contextmanager
def embedded_server() -> Iterator[None]:
    """Serve Prefect's API to this process and its children, unless a server is configured already.

    Raises:
        StoreError: the server does not start; its log is named.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    if PREFECT_API_URL.value():
        yield
        return
    log_path = writable(home() / "logs") / "prefect-server.log"
    with socket.create_server((HOST, 0)) as listening, log_path.open("wb") as log:
        url = f"http://{HOST}:{listening.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-m", "tasks.embedded_server", str(listening.fileno())],
            env=os.environ | {"PYTHONPATH": _import_path(), PARENT: str(os.getpid())},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait_until_up(server, url, log_path)
            with temporary_settings({PREFECT_API_URL: url, PREFECT_UI_URL: ""}):
                yield
                _send_what_is_queued()
        finally:
            server.terminate()
            try:
                server.wait(timeout=5)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _import_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _wait_until_up(server: "subprocess.Popen[bytes]", url: str, log_path: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=STARTUP_SECONDS):
                return
        except urllib.error.URLError:
            time.sleep(0.05)
    raise StoreError(f"PPOFLOW_HOME: Prefect's embedded server over {home() / 'prefect'} did not start; see {log_path}.")


def _send_what_is_queued() -> None:
    """Logs and events (the states of task runs among them) wait in threads for a moment before they are sent."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=10)


def _serve(descriptor: int) -> None:
    """In the server's process: the API alone, without UI or scheduler."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    os.environ.pop("PREFECT_API_URL", None)
    import uvicorn

    uvicorn.run("prefect.server.api.server:create_app", factory=True, fd=descriptor, log_level="error", lifespan="on")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
