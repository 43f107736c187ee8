"""Sample responses in MLflow: a table that its page shows, of bounded size, whatever its server does."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tasks import samples
from tasks.runs import Run
from tasks.tracking import Tracking, find_run


def write(path: Path, first: int, end: int, response: str = "r") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for step in range(first, end):
            for sample in range(2):
                row = {
                    "step": step, "sample": sample, "prompt": "1+1=", "response": f"{response}{step}.{sample}",
                    "reward": step / 2, "ground_truth": "2",
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")


def logged(run_key: str) -> list[dict[str, Any]]:
    """The table as MLflow's own reader gives it."""
    import mlflow

    run_id = find_run(run_key)
    assert run_id is not None
    client = mlflow.MlflowClient()
    found = client.load_table(client.get_run(run_id).info.experiment_id, "samples.json", run_ids=[run_id])
    return found.to_dict("records")


def of(run_key: str, **options: Any) -> Tracking:
    return Tracking("samples", run_key, "name", {}, {"trainer": {"seed": 1}}, **options)


def test_the_table_follows_the_file_and_never_repeats_a_row(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setattr(samples, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(samples, "SHARE", 0)
    path = Run("follows", {}, 4).directory / "samples.jsonl"
    first = of("follows")
    first.log_step(0, {"loss": 1.0})  # the step's metrics are written before its samples
    write(path, 0, 2)
    first.log_step(1, {"loss": 1.0})
    assert [(row["step"], row["response"], row["reward"]) for row in logged("follows")] == [
        (1, "r1.0", 0.5), (1, "r1.1", 0.5), (0, "r0.0", 0.0), (0, "r0.1", 0.0),
    ]  # fmt: skip
    write(path, 2, 3, "é")
    first.log_step(2, {"loss": 1.0})
    assert [row["response"] for row in logged("follows")][:2] == ["é2.0", "é2.1"]
    first.finish("KILLED")

    path.unlink()
    write(path, 0, 4, "again ")
    second = of("follows", done=2)
    second.log_step(3, {"loss": 1.0})
    second.finish("FINISHED")
    rows = logged("follows")
    assert [row["response"] for row in rows] == [f"again {step}.{sample}" for step in (3, 2, 1, 0) for sample in range(2)]
    assert list(rows[0])[:6] == ["step", "reward", "prompt", "response", "ground_truth", "sample"]
    run = mlflow.MlflowClient().get_run(find_run("follows"))
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    assert run.info.status == "FINISHED"


def test_a_long_run_has_a_table_of_bounded_size(tmp_path: Path) -> None:
    write(tmp_path / "samples.jsonl", 0, 1001)
    with (tmp_path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"step": 1001, "sample": 0, "prompt": "p", "response": "a" * 1500 + "b" * 1500, "reward": 1}) + "\n"
        )
    table = samples.table(tmp_path / "samples.jsonl")
    assert sorted({row["step"] for row in table}) == [*range(0, 1001, 16), 1001], "every 16th: 63 steps; and the newest"
    assert len(table) == 2 * 63 + 1
    assert table[0]["response"] == "a" * 1000 + " … 1000 characters … " + "b" * 1000
    assert table[0]["ground_truth"] is None


def test_uploads_are_a_small_share_of_the_time(home: Path) -> None:
    import mlflow

    path = home / "runs" / "seldom" / "samples.jsonl"
    run = of("seldom")
    write(path, 0, 1)
    run.log_step(0, {"loss": 1.0})
    write(path, 1, 2)
    run.log_step(1, {"loss": 1.0})
    assert {row["step"] for row in logged("seldom")} == {0}, "not again at once"
    run.finish("FINISHED")
    assert {row["step"] for row in logged("seldom")} == {0, 1}
    assert run.run_id is not None
    uri = mlflow.MlflowClient().get_run(run.run_id).info.artifact_uri
    table = Path(uri.removeprefix("file://")) / "samples.json"
    os.utime(table, (1e9, 1e9))
    run.finish("FINISHED")
    assert table.stat().st_mtime == 1e9, "nothing new, nothing sent"


def test_a_dead_artifact_store_costs_a_warning_and_no_metric(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    with socket.socket() as server:  # a port on which nobody listens
        server.bind(("127.0.0.1", 0))
        location = f"http://127.0.0.1:{server.getsockname()[1]}/artifacts"
    client = mlflow.MlflowClient()
    experiment = client.create_experiment("dead artifacts", artifact_location=location)
    client.create_run(experiment, tags={"ppoflow.run_key": "deaf"})
    write(home / "runs" / "deaf" / "samples.jsonl", 0, 3)
    run = of("deaf")
    for step in range(3):
        run.log_step(step, {"loss": float(step)})
    run.finish("FINISHED")
    said = [record.getMessage() for record in caplog.records if record.name == "tasks.tracking"]
    assert len(said) == 1
    assert said[0].startswith("MLflow does not take the samples (")
    assert said[0].endswith("The training goes on; they are in samples.jsonl.")
    found = find_run("deaf")
    assert found is not None
    assert [(point.step, point.value) for point in client.get_metric_history(found, "loss")] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert client.get_run(found).info.status == "FINISHED"
