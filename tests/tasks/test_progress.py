"""The progress bar of a training in a real flow."""

import json

import pytest

from tasks.progress import Progress, following

pytestmark = pytest.mark.usefixtures("prefect", "home")


def test_bar_on_the_page_of_the_flow_run(tmp_path):
    from prefect import flow, task
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.runtime import flow_run

    @task
    def train() -> None:
        path = tmp_path / "metrics.jsonl"
        with following(path, [Progress(4)]):
            path.write_text("".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(3)))

    @flow
    def training() -> str:
        train()
        assert flow_run.id is not None
        return flow_run.id

    run_id = training()
    with get_client(sync_client=True) as client:
        only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        bars = [artifact for artifact in client.read_artifacts(artifact_filter=only) if artifact.type == "progress"]
    assert [(bar.key, bar.data) for bar in bars] == [("training", 75.0)]


def test_nothing_is_shown_outside_a_flow(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with following(tmp_path / "metrics.jsonl", [Progress(1)]):
        pass
    assert caplog.text == ""
