"""Sample responses of a training as a table in its MLflow run: best effort, of bounded size, written anew each time.

MLflow shows an artifact as a table if the run's tag `mlflow.loggedArtifacts` says so, which `log_table` sets. Calling that for
each step would download, append to and upload the whole table each time; so it makes the table, and later ones take its place.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.lines import rows

if TYPE_CHECKING:
    from mlflow import MlflowClient

ARTIFACT = "samples.json"
COLUMNS = ("step", "reward", "prompt", "response", "ground_truth", "sample")
MOST_STEPS = 64
"""Steps in the table; of a longer run every second, fourth, … and the newest."""
MOST_CHARACTERS = 2000
"""Of a text; the middle of a longer one is left out."""
LEAST_SECONDS, SHARE = 30.0, 50
"""Between two uploads: at least so many seconds, and so many times what the last one took."""
_TAG = "mlflow.loggedArtifacts"


class SamplesTable:
    """Keeps `samples.json` of an MLflow run like the newest `samples.jsonl`.

    Args:
        path: `samples.jsonl` of the run directory; may be missing.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._not_before, self._sent_at = path, float("-inf"), -1.0

    def send(self, client: "MlflowClient", run_id: str, last: bool) -> None:
        """Upload the table if it is time to, or if it is the last time, and the file has changed.

        Raises:
            Exception: whatever MLflow and its artifact store raise; not tried again for a while.
        """
        if time.monotonic() < self._not_before and not last:
            return
        try:
            written_at = self._path.stat().st_mtime
        except OSError:
            return
        if written_at == self._sent_at:
            return
        start = time.monotonic()
        try:
            if found := table(self._path):
                _upload(client, run_id, found)
            self._sent_at = written_at
        finally:
            self._not_before = time.monotonic() + max(LEAST_SECONDS, SHARE * (time.monotonic() - start))


def table(path: Path) -> list[dict[str, Any]]:
    """The rows of the table: the newest step first, as MLflow's page begins with the first rows."""
    kept: dict[int, list[dict[str, Any]]] = {}
    newest: list[dict[str, Any]] = []
    stride = 1
    for row in rows(path):
        if newest and newest[0]["step"] != row["step"]:
            newest = []
        newest.append(row)
        if row["step"] % stride == 0:
            kept[row["step"]] = newest
        if len(kept) > MOST_STEPS:
            stride *= 2
            kept = {step: found for step, found in kept.items() if step % stride == 0}
    if newest:
        kept[newest[0]["step"]] = newest
    return [{name: _short(row.get(name)) for name in COLUMNS} for step in sorted(kept, reverse=True) for row in kept[step]]


def _upload(client: "MlflowClient", run_id: str, rows_: list[dict[str, Any]]) -> None:
    columns = {name: [row[name] for row in rows_] for name in COLUMNS}
    shown = json.loads(client.get_run(run_id).data.tags.get(_TAG, "[]"))
    if not any(entry["path"] == ARTIFACT for entry in shown):
        client.log_table(run_id, columns, ARTIFACT)
    else:
        data = [[row[name] for name in COLUMNS] for row in rows_]
        client.log_text(run_id, json.dumps({"columns": COLUMNS, "data": data}, ensure_ascii=False), ARTIFACT)


def _short(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= MOST_CHARACTERS:
        return value
    half = MOST_CHARACTERS // 2
    return f"{value[:half]} … {len(value) - 2 * half} characters … {value[-half:]}"
