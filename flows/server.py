"""The embedded Prefect server: one process for one `ppoflow run`, where `PREFECT_API_URL` names no server.

Prefect starts one by itself too, but it shares the terminal's process group (Ctrl-C ends it before the flow can report) and
outlives a flow that is killed. This one has a session of its own and dies with its parent. It boots while the flow's libraries
are imported.
"""

import atexit
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from rl_core import process
from rl_core.errors import PpoflowError
from rl_core.home import home, writable

HOST = "127.0.0.1"
START_SECONDS = 90.0
"""A first start migrates its database for 20 s, on a busy machine for longer."""
STOP_SECONDS = 5.0


class ServerError(PpoflowError):
    """The embedded server did not start."""


class EmbeddedServer:
    """A server that is booting; it is stopped when this process exits, after Prefect has sent its last records.

    To be made before Prefect is imported: it names itself in `PREFECT_API_URL`.
    """

    def __init__(self) -> None:
        port = _free_port()
        self.url = f"http://{HOST}:{port}/api"
        self.log = writable(home() / "logs") / "prefect-server.log"
        environment = os.environ | {
            process.PARENT: str(os.getpid()),
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",  # as Prefect starts its own: without scheduler and other services
            "PREFECT__SERVER_FINAL": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, process.__file__, sys.executable, "-m", "uvicorn", "--factory",
                    "prefect.server.api.server:create_app", "--host", HOST, "--port", str(port), "--log-level", "error",
                ],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        os.environ["PREFECT_API_URL"] = self.url
        atexit.register(self.stop)  # runs after what Prefect registers later

    def wait(self) -> None:
        """Until it answers.

        Raises:
            ServerError: it ended, or does not answer in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise ServerError(
            f"The embedded Prefect server did not start within {START_SECONDS:.0f} s; its log is {self.log}. Run the same "
            "command again, or start a server (`make servers`) and set PREFECT_API_URL to it."
        )

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that does not end it."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def embedded_server() -> EmbeddedServer | None:
    """Start one, unless the environment or Prefect's profile names a server."""
    profiles = Path(os.environ["PREFECT_HOME"]) / "profiles.toml"
    if os.environ.get("PREFECT_API_URL") or (profiles.exists() and "PREFECT_API_URL" in profiles.read_text(encoding="utf-8")):
        return None
    return EmbeddedServer()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
