"""MLflow's database is there whole or not at all."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.faults.hook import VARIABLE, Fault, to_environment
from tests.pipeline import ROOT, environment

PROGRAM = """
from tests.faults import hook
fault = hook.from_environment()
if fault is not None:
    hook.install(fault)
from tasks.mlflow_client import make_client
print(len(make_client().search_experiments()))
"""


def made(home: Path, fault: Fault | None = None) -> "subprocess.CompletedProcess[str]":
    settings = environment(home, **({} if fault is None else to_environment(fault)))
    return subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)


def test_killed_while_it_is_made_it_is_made_anew(tmp_path: Path) -> None:
    assert VARIABLE not in os.environ
    home = tmp_path / "home"
    for commit in (0, 20):
        fault = Fault("commits", commit, None, "self", "KILL", str(tmp_path / f"fired-{commit}"))
        assert made(home, fault).returncode == -signal.SIGKILL
        assert not (home / "mlflow" / "mlflow.db").exists()
        assert (home / "mlflow" / ".mlflow.db.partial").exists(), "it was under way"
    done = made(home)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert sorted(path.name for path in (home / "mlflow").iterdir()) == [".database.lock", "mlflow.db"]
    with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as database:
        [[place]] = database.execute("SELECT artifact_location FROM experiments")
    assert place == f"{(home / 'mlflow' / 'artifacts').as_uri()}/0"


def test_a_disk_that_refuses_is_an_error_of_mlflow(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "mlflow" / ".mlflow.db.partial").mkdir(parents=True)
    done = made(home)
    assert "could not be made" in done.stderr
    assert "MlflowException" in done.stderr
