import os
import signal
import subprocess
import sys

import psutil

from tasks.store import ROOT

FLOW = (
    "from tasks.environment import prepare; prepare(); from tasks.prefect_server import start_server; start_server();"
    "print('up', flush=True); input()"
)


def test_two_first_starts_at_once_and_nothing_left_of_a_killed_flow(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    flows = [
        subprocess.Popen(
            [sys.executable, "-c", FLOW],
            cwd=ROOT, env=environment | {"PPOFLOW_HOME": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for flow in flows:
            assert flow.stdout is not None
            assert flow.stdout.readline() == "up\n"
        servers = [server for flow in flows for server in psutil.Process(flow.pid).children()]
        assert len(servers) == 2
        for flow, number in zip(flows, (signal.SIGKILL, signal.SIGTERM), strict=True):
            flow.send_signal(number)
            flow.wait()
        _, alive = psutil.wait_procs(servers, timeout=10)
        assert not alive
    finally:
        for flow in flows:
            flow.kill()
