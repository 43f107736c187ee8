"""A disk that is full, or becomes read-only, in every stage: said, nothing broken is left, and with room the work goes on.

The disk is a small tmpfs that a child mounts in a mount namespace of its own: that needs root, or user namespaces.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import PpoflowError
from tests.pipeline import ROOT, environment, tiny_settings

MOUNT = 'mount -t tmpfs -o size=16m none "$1" && exec "$2" -m tests.tasks.test_store_disk "$1"'
NAMESPACE = ("unshare", "--map-root-user", "--mount")


def test_every_stage_on_a_full_and_on_a_read_only_disk(tmp_path: Path, mlflow_uri: str) -> None:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces may not be made here")
    tiny_settings(tmp_path / "input")
    if (database := Path(mlflow_uri.removeprefix("sqlite:///"))).is_file():  # one that is migrated already
        shutil.copy(database, tmp_path / "input")
    (tmp_path / "disk").mkdir()
    command = [*NAMESPACE, "sh", "-c", MOUNT, "sh", str(tmp_path / "disk"), sys.executable]
    result = subprocess.run(
        command, cwd=ROOT, env=environment(tmp_path / "disk"), capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "done", result.stdout


class Disk:
    """The tmpfs in which the home lies."""

    def __init__(self, path: Path) -> None:
        self.path, self.filler = path, path / "filler"

    def leave(self, free: int) -> None:
        """Fill it up to so many bytes."""
        self.filler.unlink(missing_ok=True)
        stat = os.statvfs(self.path)  # once the room of the old one is back
        with self.filler.open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - free))

    def read_only(self, yes: bool) -> None:
        """No file may be open for writing then."""
        from tasks import store_use

        if register := store_use._registers.pop(self.path / "store", None):
            register.close()
        subprocess.run(["mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(self.path)], check=True)


def error_of(action: Callable[[], Any]) -> str:
    """The paragraph for the user with which it ends; empty if it goes well."""
    try:
        action()
    except PpoflowError as error:
        print(f"{type(error).__name__}: {str(error)[:400]}", flush=True)
        return str(error)
    return ""


def main(path: Path) -> None:
    """In the child."""
    from rl_core.config import parse_config
    from rl_core.models.source import resolve
    from tasks import convert_checkpoint, evaluate_policy, tokenize_dataset, train_policy
    from tests.registered import tiny_policy

    disk, config = (
        Disk(path),
        parse_config(tiny_settings(path.parent / "input"), {"trainer.max_steps": 1, "trainer.logger": ["console"]}),
    )
    train_policy.PROGRAM = "tests.tasks.train_program"  # a training of no time; its checkpoints are tried for themselves
    source = resolve(config.model)

    small_artifacts(disk)
    checkpoints(disk)

    def stage(key: Any, action: Callable[[], Any], free: int) -> None:
        print(key.stage, flush=True)
        disk.read_only(True)
        assert "cannot be written (Read-only file system)" in error_of(action)
        disk.read_only(False)
        disk.leave(free)
        assert error_of(action).count("Make room (`ppoflow store gc`") == 1
        disk.leave(6 * 10**6)
        assert not key.path.exists()

    def repaired(key: Any, action: Callable[[], Any], free: int) -> Any:
        stage(key, action, free)
        reference = action()
        assert reference.state == "computed"
        assert reference.open().key == key.value
        return reference

    dataset_key, base_key = tokenize_dataset.key(config, source), convert_checkpoint.key(config, source)
    dataset = repaired(dataset_key, lambda: tokenize_dataset.tokenize(dataset_key, config, source), 8192)
    base = repaired(base_key, lambda: convert_checkpoint.convert(base_key, config, source), 16384)
    train_key = train_policy.key(config, dataset, base)
    repaired(train_key, lambda: train_policy.train(train_key, config, dataset, base), 0)
    policy = tiny_policy("disk")
    evaluation_key = evaluate_policy.key(config, dataset, base, policy, None)
    stage(evaluation_key, lambda: evaluate_policy.evaluate(evaluation_key, config, dataset, base, policy, None), 0)
    registration(disk, policy)


def small_artifacts(disk: Disk) -> None:
    """Room for nothing, for some of the files, for all but the manifest, for all: what is there is whole."""
    from tasks.store import Key, find, produce

    def make(scratch: Path) -> dict[str, Any]:
        for name in "abc":
            (scratch / name).write_text(name * 5000)
        return {}

    states = set()
    for pages in range(16):
        key = Key("letters", format(pages, "064x"), {})
        disk.leave(4096 * pages)
        said = error_of(lambda key=key: produce(key, make))
        assert not said or "Make room" in said
        assert key.path.exists() == (not said)
        states.add(bool(said))
        disk.leave(10**6)
        assert produce(key, make).open()
        assert find(key)
    assert states == {True, False}


def checkpoints(disk: Disk) -> None:
    """The one before is kept and used."""
    import torch

    from rl_core.checkpoint.steps import Checkpoints

    run = Checkpoints(disk.path / "checkpoints", 2)
    tensors = {"weight": torch.ones(100_000)}
    run.save(1, tensors, {}, "k")
    for free in (0, 100_000, 395_000):
        disk.leave(free)
        said = error_of(lambda: run.save(2, tensors, {}, "k"))
        assert "No space left" in said or "does not fit" in said
        latest = run.latest()
        assert latest is not None
        assert latest.results == {"step": 1}
    disk.leave(10**6)
    run.save(2, tensors, {}, "k")
    assert run.steps() == [1, 2]


def registration(disk: Disk, policy: Any) -> None:
    """No version is half registered."""
    from tasks.environment import prepare
    from tasks.mlflow_registry import champion, registry
    from tasks.mlflow_versions import make_champion, register
    from tasks.tracking import experiment_id

    given = disk.path.parent / "input" / "mlflow.db"
    (disk.path / "mlflow").mkdir(exist_ok=True)
    if given.is_file():
        shutil.copy(given, disk.path / "mlflow")
    disk.leave(6 * 10**6)
    prepare()
    with registry("make an experiment"):
        experiment = experiment_id("full")

    def registered() -> Any:
        with registry("register") as client:
            version, _ = register(client, "full", policy.open(), tags={}, experiment_id=experiment, run_id=None)
            make_champion(client, version)
            return version

    disk.leave(0)
    assert "disk is full" in error_of(registered)
    disk.leave(6 * 10**6)
    assert champion("full") is None
    assert registered().number == "1"
    found = champion("full")
    assert found is not None
    assert found.digest == policy.digest


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("done")
