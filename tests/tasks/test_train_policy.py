"""The training stage around a stand-in for `rl_core.train`: real torchrun, real store, real MLflow."""

import logging
import shutil
import threading

import pytest

from flows import explain
from rl_core.errors import ConfigError
from rl_core.locks import locked
from tasks import train_policy
from tasks.runs import Run
from tasks.store import find, reference_of
from tasks.torchrun import RanksCrashed
from tasks.tracking import find_run, steps_logged
from tests.tasks.settings import config, inputs

PROGRAM = "tests.tasks.train_program"


@pytest.fixture(autouse=True)
def _stand_in(home, monkeypatch):
    monkeypatch.setattr(train_policy, "PROGRAM", PROGRAM)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, mlflow_uri):
    """A home with a finished training of `config`."""
    directory = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_policy, "PROGRAM", PROGRAM)
        patch.setenv("PPOFLOW_HOME", str(directory / "home"))
        patch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
        train(config(directory / "input"))
    return directory / "home"


@pytest.fixture
def trained(finished, home, tmp_path):
    """Its configuration and reference, in a home of one's own."""
    shutil.copytree(finished, home)
    settings = config(tmp_path / "input")
    key = train_policy.key(settings, *inputs())
    artifact = find(key)
    assert artifact is not None
    return settings, reference_of(artifact, "computed")


def train(settings, fresh=False):
    dataset, base = inputs()
    return train_policy.train(train_policy.key(settings, dataset, base), settings, dataset, base, fresh)


def no_training(monkeypatch):
    """Whatever would be started now fails."""
    monkeypatch.setattr(train_policy, "PROGRAM", "tests.tasks.there_is_no_such_program")


def crash(settings, at, monkeypatch, fresh=False):
    with monkeypatch.context() as patch:
        patch.setenv("PPOFLOW_TEST_CRASH_AT", str(at))
        with pytest.raises(RanksCrashed, match="out of luck"):
            train(settings, fresh)


def segments(reference):
    return [(part["from_step"], part["to_step"]) for part in reference.open().results["segments"]]


def test_trained_then_found_again(tmp_path, monkeypatch):
    settings = config(tmp_path / "once")
    reference = train(settings)
    artifact = reference.open()
    run = Run.of(settings, *inputs())
    assert (reference.state, reference.resumed_from_step) == ("computed", None)
    assert artifact.results["step"] == 4
    assert artifact.results["run_key"] == run.key
    assert set(artifact.manifest["files"]) == {"model.safetensors", "metrics.jsonl", "train.log", "config.yaml"}
    weights = (reference.path / "model.safetensors", run.directory / "policy" / "model.safetensors")
    assert weights[0].samefile(weights[1])  # a hard link
    assert "from 0 to 4" in (reference.path / "train.log").read_text()
    assert segments(reference) == [(0, 4)]

    no_training(monkeypatch)
    assert train(settings).state == "reused"
    # A finished training stays finished, whatever became of its directory and of the code.
    shutil.rmtree(run.directory)
    monkeypatch.setattr(train_policy, "circumstances", lambda config: {"code": "edited"})
    again = train(settings)
    assert (again.state, again.key) == ("reused", reference.key)


def test_crashed_and_resumed_is_as_if_never_crashed(tmp_path, monkeypatch):
    import mlflow

    crash(config(tmp_path / "crash", trainer__seed=5), 2, monkeypatch)
    run_key = Run.of(config(tmp_path / "crash", trainer__seed=5), *inputs()).key
    client = mlflow.MlflowClient()
    assert client.get_run(find_run(run_key)).info.status == "FAILED"
    planned = train_policy.key(config(tmp_path / "crash", trainer__seed=5), *inputs())

    reference = train(config(tmp_path / "crash", trainer__seed=5))
    assert (reference.state, reference.resumed_from_step) == ("resumed", 2)
    assert reference.key == planned.value
    assert segments(reference) == [(0, 4)]
    assert client.get_run(find_run(run_key)).info.status == "FINISHED"
    history = client.get_metric_history(find_run(run_key), "critic/score/mean")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]

    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "uninterrupted"))
    assert train_policy.key(config(tmp_path / "crash", trainer__seed=5), *inputs()).value == reference.key


def test_longer_run_goes_on_and_other_code_is_another_segment(trained, tmp_path, monkeypatch):
    settings, first = trained
    monkeypatch.setattr(train_policy, "circumstances", lambda config: {"code": "edited"})
    longer = train(config(tmp_path / "input", trainer__max_steps=6))
    assert (longer.state, longer.resumed_from_step) == ("resumed", 4)
    assert segments(longer) == [(0, 4), (4, 6)]
    no_training(monkeypatch)
    assert train(settings).key == first.key  # still there


def test_killed_between_export_and_commit_does_not_train_again(trained, monkeypatch):
    settings, reference = trained
    shutil.rmtree(reference.path)
    no_training(monkeypatch)
    again = train(settings)
    assert (again.key, again.state, again.resumed_from_step) == (reference.key, "resumed", 4)


def test_flipped_byte_is_exported_again_from_the_checkpoint(trained, caplog):
    settings, reference = trained
    for policy in (reference.path, Run.of(settings, *inputs()).directory / "policy"):  # where linked, they are the same file
        (policy / "model.safetensors").write_text("weights after 5 steps")
    again = train(settings)
    assert (again.key, again.state, again.resumed_from_step) == (reference.key, "resumed", 4)
    assert "set aside" in caplog.text
    assert (again.path / "model.safetensors").read_text() == "weights after 4 steps"


def test_what_mlflow_missed_is_sent_later(trained):
    import mlflow

    settings, reference = trained
    artifact = reference.open()
    run_key = artifact.results["run_key"]
    mlflow.MlflowClient().delete_run(find_run(run_key))
    assert steps_logged(run_key) == 0
    train_policy.catch_up(settings, artifact)
    assert steps_logged(run_key) == 4
    run_id = find_run(run_key)
    train_policy.catch_up(settings, artifact)
    assert find_run(run_key) == run_id


def test_fresh_starts_over(tmp_path, monkeypatch):
    crash(config(tmp_path / "fresh"), 2, monkeypatch)
    reference = train(config(tmp_path / "fresh"), fresh=True)
    run = Run.of(config(tmp_path / "fresh"), *inputs())
    assert (reference.state, reference.resumed_from_step) == ("computed", None)
    assert "from 2" not in (reference.path / "train.log").read_text()
    assert [path.name for path in run.directory.parent.iterdir() if "replaced" in path.name] == []


def outcome(settings):
    """What `ppoflow explain` says of the training."""
    dataset, base = inputs()
    looks = explain._look(train_policy.key(settings, dataset, base), Run.of(settings, dataset, base))
    return next(looks)


def test_interrupted_fresh_goes_on_without_the_option(trained, monkeypatch):
    settings, first = trained
    written = (first.path / "manifest.json").stat().st_mtime_ns
    crash(settings, 2, monkeypatch, fresh=True)
    assert outcome(settings).outcome == "resumes"
    assert "from step 2 of 4" in outcome(settings).reason
    again = train(settings)
    assert (again.state, again.resumed_from_step) == ("resumed", 2)
    assert (again.path / "manifest.json").stat().st_mtime_ns > written
    assert (again.path / "train.log").read_text().startswith("from 0 to 4")
    assert outcome(settings).outcome == "reused"
    no_training(monkeypatch)
    assert train(settings).state == "reused"


def test_fresh_interrupted_before_the_first_checkpoint_is_not_forgotten(trained, monkeypatch):
    settings, _ = trained
    crash(settings, 0, monkeypatch, fresh=True)
    assert outcome(settings).outcome == "runs"
    assert train_policy.key(settings, *inputs()).replacing  # Prefect's record of the earlier one does not count either
    assert train(settings).state == "computed"
    assert not train_policy.key(settings, *inputs()).replacing


def test_fewer_steps_than_there_are_is_refused_before_anything_is_written(trained, tmp_path):
    settings, reference = trained
    shorter = config(tmp_path / "input", trainer__max_steps=3)
    run = Run.of(settings, *inputs())
    before = {name: (run.directory / name).read_bytes() for name in ("config.yaml", "segments.json")}
    assert outcome(shorter).outcome == "refused"
    with pytest.raises(ConfigError, match=r"trainer\.max_steps: 3 .* has 4 steps already .* start over with --fresh"):
        train(shorter)
    assert {name: (run.directory / name).read_bytes() for name in before} == before
    assert train(settings).key == reference.key
    assert train(shorter, fresh=True).open().results["step"] == 3


def test_waits_until_the_last_rank_of_a_predecessor_is_gone(tmp_path, caplog):
    settings = config(tmp_path / "wait")
    run = Run.of(settings, *inputs())
    waiting, done = threading.Event(), []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "ranks of a killed run" in record.getMessage():
                waiting.set()

    caplog.set_level(logging.INFO, "tasks.train_policy")
    logging.getLogger("tasks.train_policy").addHandler(handler := Seen())
    try:
        with locked(run.directory / "ranks.lock", shared=True):
            successor = threading.Thread(target=lambda: done.append(train(settings)))
            successor.start()
            assert waiting.wait(60)
            assert not (run.directory / "train.log").exists()
        successor.join()
    finally:
        logging.getLogger("tasks.train_policy").removeHandler(handler)
    assert done[0].state == "computed"
