"""The server that a flow brings along where `PREFECT_API_URL` names none.

It is Prefect's temporary server with three faults mended: it stays behind for ever when its flow is killed or ended by
SIGTERM; a Ctrl-C ends it before the flow has reported how it ended; of several first starts on the same database one fails in
the migration.
"""

import os
import subprocess
import sys
from typing import Any

import prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, get_current_settings

from rl_core import process
from rl_core.home import home
from rl_core.locks import locked


def start_server() -> None:
    """Start it, if one is needed; Prefect stops it when this process exits.

    To be called by the main thread: the kernel takes the end of the thread that started it for the end of its parent.
    """
    if not PREFECT_API_URL.value():
        with locked(home() / "prefect.lock"):
            _Server().start()


class _Server(SubprocessASGIServer):
    """Takes the place of Prefect's own: there is one instance for "any port", the first that is asked for."""

    def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
        """Prefect's command behind `rl_core.process`."""
        command = [
            sys.executable, "-I", process.__file__,
            sys.executable, "-m", "uvicorn", "--app-dir", str(prefect.__module_path__.parent), "--factory",
            "prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(self.port),
            "--log-level", "error", "--lifespan", "on",
        ]  # fmt: skip
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        flags = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        environment = os.environ | flags | settings | {process.PARENT: str(os.getpid())}
        return subprocess.Popen(command, env=environment, start_new_session=True)
