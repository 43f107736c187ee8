import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
    """A tiny `ppoflow run`, shared by all tests: do not change its home's artifacts."""
    directory = tmp_path_factory.mktemp("finished")
    config = tiny_config(directory)
    process = ppoflow("run", config, "--json", directory / "report.json", home=directory / "home")
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(directory / "home", config, process, json.loads((directory / "report.json").read_text(encoding="utf-8")))
