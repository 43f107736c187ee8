import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rl_core.locks import locked
from tests.pipeline import ppoflow, tiny_config


@dataclass(frozen=True)
class Finished:
    """A pipeline that ran to its end: where, from what, and what it said."""

    home: Path
    config: Path
    process: "subprocess.CompletedProcess[str]"
    report: dict[str, Any]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A tiny `ppoflow run`, shared by all tests, those of other workers too: do not change its home."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    report, told = directory / "report.json", directory / "told.json"
    with locked(directory.with_suffix(".lock")):
        if not told.exists():
            directory.mkdir()
            process = ppoflow("run", tiny_config(directory), "--json", report, home=directory / "home")
            shutil.copytree(directory / "home", directory / "untouched")
            told.write_text(json.dumps([process.args, process.returncode, process.stdout, process.stderr]))
    process = subprocess.CompletedProcess(*json.loads(told.read_text()))
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(directory / "home", directory / "tiny.yaml", process, json.loads(report.read_text(encoding="utf-8")))


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Finished:
    """The same with a home that a test may change. (MLflow's files stay where they are.)"""
    shutil.copytree(finished.home.with_name("untouched"), tmp_path / "home")
    return replace(finished, home=tmp_path / "home")
