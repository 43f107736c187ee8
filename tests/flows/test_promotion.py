"""`promote` and `rollback`, against MLflow's sqlite store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.promotion import promote, rollback
from rl_core.errors import BrokenArtifact, ConfigError
from tasks.mlflow_registry import champion, find_version, registry
from tasks.mlflow_versions import ROLLED_BACK, register
from tasks.tracking import experiment_id
from tests.registered import shared_home, tiny_policy


@pytest.fixture(autouse=True)
def registry_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A PPOFLOW_HOME with an MLflow database, shared by the tests of the session."""
    with shared_home(tmp_path_factory) as home:
        yield home


def versions(name: str, count: int) -> None:
    """Register so many policies under a name."""
    with registry("register a test's policies") as client:
        for seed in range(count):
            policy = tiny_policy(name, seed).open()
            register(client, name, policy, tags={}, experiment_id=experiment_id("promotion tests"), run_id=None)


def champion_of(name: str) -> str | None:
    best = champion(name)
    return best and best.version


def test_promote_and_roll_back_along_the_history() -> None:
    versions("history", 3)
    assert promote("history", 1) == "The champion of history is version 1. To undo: ppoflow rollback history"
    promote("history", 2)
    promote("history", "3")
    promote("history", 3)
    assert champion_of("history") == "3"
    assert rollback("history") == "The champion of history is version 2 again."
    rollback("history")
    assert champion_of("history") == "1"
    with pytest.raises(ConfigError, match=r"Version 1, the champion of history, replaced no other .*ppoflow promote history"):
        rollback("history")
    assert champion_of("history") == "1"


def test_promoting_again_forgets_the_rollback() -> None:
    versions("forgiven", 2)
    promote("forgiven", 1)
    promote("forgiven", 2)
    rollback("forgiven")
    with registry("look") as client:
        assert find_version(client, "forgiven", "2").tags[ROLLED_BACK] == "1"
    promote("forgiven", 2)
    with registry("look") as client:
        assert ROLLED_BACK not in find_version(client, "forgiven", "2").tags


def test_damaged_files_are_not_promoted(registry_home: Path) -> None:
    import mlflow

    versions("damaged", 2)
    promote("damaged", 1)
    (Path(mlflow.artifacts.download_artifacts("models:/damaged/2")) / "model.safetensors").unlink()
    with pytest.raises(BrokenArtifact, match=r"Version 2 of damaged.*model\.safetensors is missing"):
        promote("damaged", 2)
    assert champion_of("damaged") == "1"


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: promote("missing", 1), "MLflow has no registered model missing"),
        (lambda: promote("present", 9), r"present has no version or alias 9. Choose one of its versions \(1\)"),
        (lambda: rollback("missing"), "MLflow has no registered model missing"),
        (lambda: rollback("present"), "present has no version or alias champion"),
    ],
)
def test_what_does_not_exist_is_said(action: object, message: str) -> None:
    versions("present", 1)
    with pytest.raises(ConfigError, match=message):
        action()  # type: ignore[operator]
