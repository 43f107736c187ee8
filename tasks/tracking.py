"""Metrics and sample responses of a training in MLflow: best effort, one run however often it is killed and resumed.

The run is found by its tag `ppoflow.run_key`. A tracking server that does not answer is warned about once; what it missed is
sent when it answers again, in the same or in a later process.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rl_core.home import home
from tasks.mlflow_client import make_client
from tasks.samples import SamplesTable

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

RUN_KEY = "ppoflow.run_key"
LOGGED = "ppoflow.steps_logged"
RETRY_SECONDS = 60.0
TIMES = ("timing_s/", "perf/")
"""What differs although a step is made again bit by bit."""
Metrics = Mapping[str, Any]
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


def experiment_id(name: str) -> str:
    """The id of an experiment, which is made where missing.

    With the default sqlite store its artifacts go under `PPOFLOW_HOME`: MLflow would take `./mlruns`.

    Raises:
        MlflowException: MLflow does not answer.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    client = make_client()
    local = mlflow.get_tracking_uri().startswith("sqlite:")
    try:
        found = client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return client.create_experiment(name, artifact_location=(home() / "mlflow" / "artifacts").as_uri() if local else None)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        found = client.get_experiment_by_name(name)  # another process was faster
        assert found is not None
        return found.experiment_id


def find_run(run_key: str) -> str | None:
    """The id of the newest MLflow run of a training, in whatever experiment.

    Raises:
        MlflowException: MLflow does not answer.
    """
    client = make_client()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(
        experiments, f"tags.`{RUN_KEY}` = '{run_key}'", order_by=["attributes.start_time DESC"], max_results=1
    )
    return runs[0].info.run_id if runs else None


def steps_logged(run_key: str) -> int:
    """How many steps of a training MLflow has; 0 if it has no run of it.

    Raises:
        MlflowException: MLflow does not answer.
    """
    run_id = find_run(run_key)
    return _steps_logged(make_client(), run_id) if run_id is not None else 0


def _steps_logged(client: "MlflowClient", run_id: str) -> int:
    return int(client.get_run(run_id).data.tags.get(LOGGED, 0))


class Tracking:
    """The MLflow run of one training. Its methods do not raise when MLflow fails.

    Args:
        experiment: name of the experiment.
        run_key: of `tasks.runs.Run`.
        name: shown for the run.
        params: few and short.
        config: the whole configuration, kept as the run's `config.yaml`.
        done: steps that are not made again. Those behind them that MLflow has are of a killed process: where they are made again
            with other numbers (a GPU without `trainer.deterministic`), these are sent too, since MLflow deletes none.
        fresh: make a new run although there is one.
    """

    def __init__(
        self,
        experiment: str,
        run_key: str,
        name: str,
        params: Mapping[str, Any],
        config: Mapping[str, Any],
        done: int = 0,
        fresh: bool = False,
    ) -> None:
        self._experiment, self._run_key, self._name = experiment, run_key, name
        self._params, self._config, self._done, self._fresh = params, config, done, fresh
        self.run_id: str | None = None
        """None until MLflow has answered."""
        self._samples = SamplesTable(home() / "runs" / run_key / "samples.jsonl")
        self._pending: dict[int, Metrics] = {}
        self._had = self._logged = 0
        self._retry_at = 0.0
        self._warned: set[str] = set()

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step, counted from 0, unless an earlier process did and it is one of those done then."""
        self._pending[step] = metrics
        if time.monotonic() >= self._retry_at:
            self._send(None)

    def finish(self, status: Status) -> None:
        """Send what is left and say how the training ended."""
        self._send(status)

    def _send(self, status: Status | None) -> None:
        from mlflow.exceptions import MlflowException

        try:
            client = make_client()
            run_id = self.run_id or self._open(client)
            for step in sorted(self._pending):
                if step >= self._had and not (step < self._logged and self._has(client, run_id, step, self._pending[step])):
                    self._log(client, run_id, step, self._pending[step])
                del self._pending[step]
            if status is not None:
                client.set_terminated(run_id, status)
            self._send_samples(client, run_id, last=status is not None)
        except (MlflowException, OSError) as error:  # OSError: the disk's, and those of requests
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._warn("metrics", error)

    def _send_samples(self, client: "MlflowClient", run_id: str, last: bool) -> None:
        try:
            self._samples.send(client, run_id, last)
        except Exception as error:  # noqa: BLE001 - of whatever stores the artifacts; the metrics go on
            self._warn("samples", error)

    def _warn(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            reason = " ".join(str(error).split())[:200]
            logger.warning("MLflow does not take the %s (%s). The training goes on; they are in %s.jsonl.", what, reason, what)

    def _open(self, client: "MlflowClient") -> str:
        """Find the run, else make it; returns its id."""
        run_id = None if self._fresh else find_run(self._run_key)
        if run_id is None:
            run = client.create_run(experiment_id(self._experiment), tags={RUN_KEY: self._run_key}, run_name=self._name)
            run_id = run.info.run_id
            for key, value in self._params.items():
                client.log_param(run_id, key, value)
            client.log_dict(run_id, dict(self._config), "config.yaml")
        else:
            client.update_run(run_id, status="RUNNING")
            self._logged = _steps_logged(client, run_id)
            self._had = min(self._done, self._logged)
        self.run_id = run_id
        return run_id

    def _log(self, client: "MlflowClient", run_id: str, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        values = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        client.log_batch(run_id, metrics=values, tags=[RunTag(LOGGED, str(step + 1))])
        self._logged = max(self._logged, step + 1)

    def _has(self, client: "MlflowClient", run_id: str, step: int, metrics: Metrics) -> bool:
        """Whether MLflow has the same numbers of a step, times aside."""
        for name, value in metrics.items():
            if name.startswith(TIMES):
                continue
            known = [metric for metric in client.get_metric_history(run_id, name) if metric.step == step]
            if not known:
                return False
            newest = max(known, key=lambda metric: metric.timestamp).value
            if newest != value and not (math.isnan(newest) and math.isnan(value)):
                return False
        return True
