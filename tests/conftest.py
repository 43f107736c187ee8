"""Fixtures for tests that use a store, Prefect or MLflow: all real, each made as seldom as possible."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow database (sqlite) shared by the session's tests: migrating a new one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_uri: str) -> Path:
    """An empty `PPOFLOW_HOME`."""
    directory = tmp_path / "home"
    monkeypatch.setenv("PPOFLOW_HOME", str(directory))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    return directory


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect server with an empty database and an empty result store."""
    from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    storage = tmp_path_factory.mktemp("prefect-results")
    with prefect_test_harness(server_startup_timeout=90), temporary_settings({PREFECT_RESULTS_LOCAL_STORAGE_PATH: storage}):
        yield
