import json
import os
import subprocess
import sys
from pathlib import Path

from tasks.store import ROOT

SHOW = "import json, os; from tasks.environment import prepare; prepare(); print(json.dumps(dict(os.environ)))"


def prepared(directory: Path, **environment: str) -> dict[str, str]:
    """The environment after `prepare()` in a process that is started in `directory` with this one."""
    environment |= {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, "-c", SHOW], env=environment, cwd=directory, capture_output=True, check=True)
    return json.loads(process.stdout)


def test_everything_goes_under_the_home_and_nothing_calls_home(tmp_path):
    result = prepared(tmp_path, PPOFLOW_HOME="home")
    home = tmp_path / "home"
    assert result["PPOFLOW_HOME"] == str(home)
    assert result["PREFECT_HOME"] == str(home / "prefect")
    assert result["MLFLOW_TRACKING_URI"] == f"sqlite:///{home}/mlflow/mlflow.db"
    assert (home / "mlflow").is_dir()
    assert result["DO_NOT_TRACK"] == "1"
    assert result["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_what_the_user_has_set_stays(tmp_path):
    stated = {"PREFECT_HOME": "/p", "MLFLOW_TRACKING_URI": "http://m", "HF_HOME": "/hf", "MLFLOW_HTTP_REQUEST_TIMEOUT": "99"}
    result = prepared(tmp_path, PPOFLOW_HOME=str(tmp_path), **stated)
    assert {name: result[name] for name in stated} == stated
    assert "HF_HUB_CACHE" not in result


def test_prefect_understands_the_settings(tmp_path):
    """A misspelt one would be ignored without a word."""
    show = (
        "from tasks.environment import prepare; prepare(); from prefect.settings import get_current_settings as s; s = s();"
        "print(s.home, s.server.analytics_enabled, s.server.ephemeral.startup_timeout_seconds, s.server.ui.v2_enabled,"
        " s.server.ui.show_promotional_content, s.flows.heartbeat_frequency, s.worker.query_seconds,"
        " sorted(s.logging.extra_loggers), s.logging.to_api.when_missing_flow, s.server.ephemeral.enabled)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    output = subprocess.run(
        [sys.executable, "-c", show], env=environment | {"PPOFLOW_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    stated = "False 90 False False 30 2.0 ['rl_core', 'tasks'] ignore True"
    assert output.strip() == f"{tmp_path}/prefect {stated}"
