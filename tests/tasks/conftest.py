from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.registered import shared_home


@pytest.fixture
def registry_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A PPOFLOW_HOME with an MLflow database, shared by the tests of the session."""
    with shared_home(tmp_path_factory) as home:
        yield home
