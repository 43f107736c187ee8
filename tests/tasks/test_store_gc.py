"""What `ppoflow store gc` deletes, and what it leaves: real locks of real processes, versions in MLflow's sqlite store."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.artifacts import commit, fresh_scratch, scratch_of, set_aside
from rl_core.locks import locked
from tasks import store_use
from tasks.mlflow_registry import CHAMPION, RegistryError, registry
from tasks.mlflow_versions import register
from tasks.runs import Run
from tasks.store import ROOT, Key, Reference, find, lock_path, produce
from tasks.store_contents import artifacts, leavings, run_directories
from tasks.store_gc import collect
from tasks.store_references import references, registered
from tasks.tracking import experiment_id

DAY = 86400.0

PROCESS = """
import sys
from pathlib import Path
from tasks.store import Key, produce
def make(scratch):
    (scratch / "half").write_text("half")
    if sys.argv[1] == "making":
        print("ready", flush=True); sys.stdin.read()
    return {}
produce(Key("letters", sys.argv[2], {}), make)
print("ready", flush=True); sys.stdin.read()
"""

FLOWS = """
import sys
from tasks import store_use
from tasks.store import Key, produce
from rl_core.home import home
def make(scratch):
    (scratch / "letter").write_text("a" * 1000)
    return {}
for number in range(int(sys.argv[1])):
    made = produce(Key("letters", format(number % 2, "064x"), {}), make)
    assert (made.open().path / "letter").read_text() == "a" * 1000
    store_use._registers.pop(home() / "store").close()  # as at the end of a flow's process
"""


@pytest.fixture(autouse=True)
def _environment(home: Path) -> Iterator[None]:
    """`tasks.environment.prepare` sets what the next test must not find."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def made(stage: str, number: int, components: dict[str, Any] | None = None, days: float = 40) -> Reference:
    """An artifact that some process made and used so long ago."""
    store = Path(os.environ["PPOFLOW_HOME"]) / "store"

    def make(scratch: Path) -> dict[str, Any]:
        (scratch / "file").write_text(f"{stage} {number}" * 1000)
        return {}

    reference = produce(Key(stage, format(number, "064x"), components or {}), make)
    store_use._registers.pop(store).close()
    aged(reference.path, days)
    return reference


def aged(path: Path, days: float = 40) -> None:
    stat = path.stat()
    os.utime(path, (stat.st_atime - days * DAY, stat.st_mtime - days * DAY))


def left() -> set[str]:
    return {item.name for item in [*artifacts(), *run_directories()]}


def process(what: str, key: str) -> "subprocess.Popen[str]":
    started = subprocess.Popen(
        [sys.executable, "-c", PROCESS, what, key], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def needed() -> dict[str, list[str]]:
    return references(artifacts(), run_directories(), registered())


def test_what_was_not_used_for_long_and_nobody_needs_goes(home: Path) -> None:
    old, young = made("letters", 1), made("letters", 2, days=20)
    would = collect(30 * DAY, dry_run=True)
    assert [item.path for item in would.items] == [old.path]
    assert old.open()
    store_use._registers.pop(home / "store").close()
    assert collect(30 * DAY).items == [], "it was used just now"
    aged(old.path)
    done = collect(30 * DAY)
    assert [item.path for item in done.items] == [old.path]
    assert done.freed >= 9000
    assert left() == {f"letters/{young.key}"}
    assert {path.name for path in (home / "store" / "letters").iterdir()} == {young.key, f".{young.key}.lock"}
    assert produce(Key("letters", old.key, {}), lambda scratch: {}).state == "computed"


def test_the_lineage_of_a_registered_version_stays(home: Path) -> None:
    dataset, base = made("tokenize_dataset", 1), made("convert_checkpoint", 2)
    policy = made("train_policy", 3, {"run.dataset": dataset.digest, "run.base": base.digest})
    answers, others = made("evaluate_model", 4), made("evaluate_model", 5)
    evaluation = made("evaluate_policy", 6, {"input.evaluations.policy": answers.key})
    unregistered = made("train_policy", 7, {"run.dataset": dataset.digest})
    tags = {"ppoflow.train_policy.key": policy.key, "ppoflow.evaluate_policy.key": evaluation.key}
    with registry("register a test's policy") as client:
        experiment = experiment_id("garbage")
        version, _ = register(client, "lineage-stays", policy.open(), tags=tags, experiment_id=experiment, run_id=None)
        client.set_registered_model_alias("lineage-stays", CHAMPION, version.number)
    store_use._registers.pop(home / "store").close()
    assert needed()[f"tokenize_dataset/{dataset.key}"] == ["lineage-stays/1@champion"]
    assert {item.key for item in collect(0).items} == {others.key, unregistered.key}
    kept = (dataset, base, policy, answers, evaluation)
    assert left() == {f"{one.stage}/{one.key}" for one in kept}
    with registry("delete a test's version") as client:
        client.delete_registered_model("lineage-stays")
    assert {item.key for item in collect(0).items} == {one.key for one in kept}


def test_what_a_living_process_uses_stays(home: Path) -> None:
    dataset = made("tokenize_dataset", 1)
    key = Key("letters", "2" * 64, {"input": dataset.digest})
    produce(key, lambda scratch: {})
    store_use._registers.pop(home / "store").close()
    user = process("using", key.value)
    assert needed() == {
        name: [f"process {user.pid} on {os.uname().nodename}"]
        for name in (f"letters/{key.value}", f"tokenize_dataset/{dataset.key}")
    }
    assert collect(0).items == []
    user.kill()
    user.wait()
    assert len(list((home / "store" / ".users").iterdir())) == 1
    assert {item.key for item in collect(0).items} == {key.value, dataset.key}
    assert list((home / "store" / ".users").iterdir()) == []


def test_what_is_being_made_stays_and_what_its_dead_writer_left_goes(home: Path) -> None:
    writer = process("making", "1" * 64)
    scratch = scratch_of(Key("letters", "1" * 64, {}).path)
    assert [(item.state, item.path) for item in leavings()] == [("being made", scratch)]
    assert collect(0).items == []
    writer.kill()
    writer.wait()
    assert [(item.state, item.path) for item in leavings()] == [("unfinished", scratch)]
    assert [item.path for item in collect(30 * DAY).items] == [scratch]
    assert list((home / "store" / "letters").iterdir()) == [], "no lock either"


def test_what_was_set_aside_goes_but_not_while_its_key_is_made(home: Path) -> None:
    broken = made("letters", 1)
    aside = set_aside(broken.path)
    with locked(lock_path(Key("letters", broken.key, {}))):
        assert collect(0).items == []
    assert [item.path for item in collect(30 * DAY).items] == [aside]
    assert not aside.exists()


def run_directory(number: int, exported: bool, days: float = 40, dataset: str = "d" * 64) -> Run:
    """A training of 2 steps with one checkpoint, and what dead writers leave in it."""
    run = Run(format(number, "064x"), {}, 2)
    run.directory.mkdir(parents=True)
    run.write_segments(run.segments({"code": "a"}))
    (run.directory / "config.yaml").write_text("registry: {name: letters}\n")
    checkpoint = run.directory / "checkpoints" / "step_000001"
    scratch = fresh_scratch(checkpoint)
    (scratch / "state.json").write_text(json.dumps({"identity": {"dataset": dataset, "base": "b" * 64}}))
    commit(scratch, checkpoint, kind="checkpoint", key=run.key, results={"step": 1})
    if exported:
        commit(fresh_scratch(run.directory / "policy"), run.directory / "policy", kind="policy", key="", results={"step": 2})
    for name in (".policy.partial", "checkpoints/.step_000002.partial", "checkpoints/.step_000001.broken-0"):
        (run.directory / name).mkdir()
    (run.directory / "ranks.lock").touch()
    aged(run.directory, days)
    return run


def test_of_runs_only_finished_old_unregistered_ones_go_and_leavings_from_all(home: Path) -> None:
    dataset, policy = made("tokenize_dataset", 1), made("train_policy", 2)
    finished, young, crowned = run_directory(1, True), run_directory(2, True, days=3), run_directory(3, True)
    stopped, running, ranks = run_directory(4, False, dataset=dataset.digest), run_directory(5, True), run_directory(6, True)
    replaced = home / "runs" / f".{stopped.key}.replaced-0"  # an interrupted --fresh
    replaced.mkdir()
    with registry("register a test's policy") as client:
        tags = {"ppoflow.run_key": crowned.key}
        register(client, "runs-stay", policy.open(), tags=tags, experiment_id=experiment_id("garbage"), run_id=None)
    store_use._registers.pop(home / "store").close()
    with locked(running.lock_path), locked(ranks.directory / "ranks.lock", shared=True):
        gone = {item.path for item in collect(30 * DAY).items}
    assert finished.directory in gone
    assert not finished.directory.exists()
    for run in (young, crowned, stopped, running, ranks):
        assert (run.directory / "checkpoints" / "step_000001" / "manifest.json").is_file()
    for run in (young, crowned, stopped):
        assert not [*run.directory.glob(".*"), *(run.directory / "checkpoints").glob(".*")]
    for run in (running, ranks):
        assert len([*run.directory.glob(".*"), *(run.directory / "checkpoints").glob(".*")]) == 3
    assert replaced.is_dir()
    assert {(item.key, item.state) for item in run_directories()} >= {(stopped.key, "stopped"), (stopped.key, "replaced")}
    assert dataset.path.is_dir(), "a training that is not finished needs it"
    with registry("delete a test's version") as client:
        client.delete_registered_model("runs-stay")


def test_files_that_mlflow_keeps_are_not_counted_as_freed(home: Path, tmp_path: Path) -> None:
    policy = made("train_policy", 1)
    os.link(policy.path / "file", tmp_path / "kept")
    size = (tmp_path / "kept").stat().st_blocks * 512
    would = collect(0, dry_run=True)
    assert would.items[0].bytes - would.freed == size
    os.unlink(tmp_path / "kept")
    assert collect(0).freed == would.freed + size


def test_without_the_registry_nothing_is_deleted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = made("letters", 1)
    aside = set_aside(made("letters", 2).path)
    for name, value in {"TRACKING_URI": "http://127.0.0.1:9", "HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    with pytest.raises(RegistryError, match="could not tell which versions are registered"):
        collect(0)
    assert old.path.is_dir()
    assert aside.is_dir()


def test_who_begins_to_use_something_is_waited_for(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = made("letters", 1)
    caplog.set_level("INFO", "tasks.store_use")
    collector = threading.Thread(target=collect, args=(0,))
    with locked(home / "store" / ".gc.lock", shared=True):  # as in `use`, before its line is written
        collector.start()
        while collector.is_alive() and "list of the store's users" not in caplog.text:
            collector.join(0.01)
        store_use.use(artifact.path)
    collector.join()
    assert artifact.open()


def test_nobody_begins_to_use_what_is_being_deleted(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact, opened = made("letters", 1), []
    caplog.set_level("INFO", "tasks.store_use")
    user = threading.Thread(target=lambda: opened.append(find(Key("letters", artifact.key, {}))))
    with store_use.collecting(home / "store"):
        user.start()
        while user.is_alive() and "list of the store's users" not in caplog.text:
            user.join(0.01)
        set_aside(artifact.path)
    user.join()
    assert opened == [None]


def test_flows_go_on_beside_it(home: Path) -> None:
    flows = [subprocess.Popen([sys.executable, "-c", FLOWS, "6"], cwd=ROOT) for _ in range(2)]
    deleted = 0
    while any(flow.poll() is None for flow in flows):
        deleted += len(collect(0).items)
    assert [flow.wait() for flow in flows] == [0, 0]
    assert deleted > 0
