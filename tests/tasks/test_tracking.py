import json
import math
import os
import socket
import threading

import pytest
import requests

from tasks.progress import following
from tasks.tracking import Tracking, experiment_id, find_run, steps_logged

pytestmark = pytest.mark.usefixtures("home")


def tracking(run_key: str, **options) -> Tracking:
    return Tracking("letters", run_key, "name", {"seed": 1}, {"trainer": {"seed": 1}}, **options)


def history(run_id: str, name: str = "loss") -> list[tuple[int, float]]:
    import mlflow

    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run_id, name)]


def run_of(run_key: str):
    import mlflow

    run_id = find_run(run_key)
    assert run_id is not None
    return mlflow.MlflowClient().get_run(run_id)


def test_one_run_however_often_it_is_resumed():
    assert find_run("one") is None
    first = tracking("one")
    for step in range(3):
        first.log_step(step, {"loss": step / 2})
    first.finish("KILLED")
    assert run_of("one").info.status == "KILLED"

    second = tracking("one", done=2)  # goes on from the checkpoint of step 2: makes step 2 again
    for step in range(4):
        second.log_step(step, {"loss": step / 2 if step < 2 else step})
    assert run_of("one").info.status == "RUNNING"
    second.finish("FINISHED")
    run = run_of("one")
    assert run.info.status == "FINISHED"
    assert run.info.run_id == first.run_id == second.run_id
    assert run.data.params == {"seed": "1"}
    assert history(run.info.run_id) == [(0, 0.0), (1, 0.5), (2, 1.0), (2, 2.0), (3, 3.0)]
    assert steps_logged("one") == 4


def test_a_step_that_is_made_again_with_the_same_numbers_is_there_once():
    first = tracking("again")
    for step in range(3):
        first.log_step(step, {"loss": math.nan if step == 1 else step / 2, "timing_s/step": 0.5})
    first.log_step(0, {"loss": 0.0, "timing_s/step": 0.7})  # the ranks were started again under the same flow
    second = tracking("again")
    for step in range(4):
        second.log_step(step, {"loss": math.nan if step == 1 else step / 2, "timing_s/step": 0.6})
    second.finish("FINISHED")
    for name in ("loss", "timing_s/step"):
        assert [step for step, _ in history(second.run_id, name)] == [0, 1, 2, 3]
    assert steps_logged("again") == 4


def test_fresh_makes_a_run_of_its_own_which_is_then_found():
    old = tracking("fresh")
    old.log_step(0, {"loss": 1.0})
    new = tracking("fresh", fresh=True)
    new.log_step(0, {"loss": 2.0})
    assert old.run_id != new.run_id
    assert find_run("fresh") == new.run_id


def test_artifacts_go_under_the_home(home):
    import mlflow

    run = Tracking("artifacts", "artifacts", "name", {}, {"trainer": {"seed": 1}})
    run.log_step(0, {"loss": 1.0})
    assert mlflow.MlflowClient().get_experiment(experiment_id("artifacts")).artifact_location == f"file://{home}/mlflow/artifacts"
    assert [path.name for path in (home / "mlflow" / "artifacts").glob("**/config.yaml")] == ["config.yaml"]


def test_dead_server_is_warned_about_once_and_caught_up_with(monkeypatch, caplog, mlflow_uri):
    with socket.socket() as server:  # a port on which nobody listens
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    run = tracking("dead")
    for step in range(3):
        run.log_step(step, {"loss": float(step)})
    run.finish("FINISHED")
    assert [record.levelname for record in caplog.records if record.name == "tasks.tracking"] == ["WARNING"]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    run.finish("FINISHED")
    assert history(run_of("dead").info.run_id) == [(0, 0.0), (1, 1.0), (2, 2.0)]


class Listener:
    def __init__(self) -> None:
        self.told: list = []
        self.changed = threading.Condition()

    def log_step(self, step, metrics) -> None:
        with self.changed:
            self.told.append((step, dict(metrics)))
            self.changed.notify()

    def finish(self, status) -> None:
        self.told.append(status)


def test_following_a_file_that_grows_and_is_replaced(tmp_path, caplog):
    path, listener = tmp_path / "metrics.jsonl", Listener()

    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    def wait(count: int) -> bool:
        with listener.changed:
            return listener.changed.wait_for(lambda: len(listener.told) >= count, 30)

    def replace(text: str) -> None:
        (tmp_path / "partial").write_text(text)
        os.replace(tmp_path / "partial", path)

    with following(path, [Broken(), listener]):
        append(json.dumps({"step": 0, "a": 1}) + "\n" + '{"step": 1, ')
        assert wait(1)
        append('"a": 2}\n')
        assert wait(2)
        # A resumed training drops what was not saved and makes it again; the file is never shorter than what was read.
        replace(json.dumps({"step": 0, "a": 1}) + "\n" + json.dumps({"step": 1, "a": 3}) + "\n" + "torn\n")
        assert wait(3)
        append(json.dumps({"step": 2, "a": 4}) + "\n")
        assert wait(4)
        path.write_text(json.dumps({"step": 0, "a": 1}) + "\n")
    assert listener.told == [(0, {"a": 1}), (1, {"a": 2}), (1, {"a": 3}), (2, {"a": 4}), "FINISHED"]
    assert [record.getMessage() for record in caplog.records if record.name == "tasks.progress"] == [
        "Broken cannot follow the training (ConnectionError: nobody listens), which goes on."
    ]


class Broken:
    """A listener that has lost its server."""

    def log_step(self, step, metrics) -> None:
        raise requests.ConnectionError("nobody listens")

    def finish(self, status) -> None:
        raise requests.ConnectionError("nobody listens")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (RuntimeError, "FAILED")])
def test_how_a_training_ended(tmp_path, error, status):
    listener = Listener()
    with pytest.raises(error), following(tmp_path / "none", [listener]):
        raise error
    assert listener.told == [status]
