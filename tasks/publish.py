"""Showing an evaluation where people look: on the run's page in Prefect and in the run in MLflow.

Best effort: the store holds all of it, so a server that does not answer costs a warning and a bounded wait.
"""

import base64
import json
import logging

from rl_core.artifacts import Artifact
from tasks.mlflow_registry import RegistryError, registry
from tasks.report import read_jsonl
from tasks.tracking import find_run

logger = logging.getLogger(__name__)

PLOTS = ("learning_curve", "rewards")
FILES = ("report.json", "report.md", "samples.md", "learning_curve.png", "rewards.png")
EVALUATION = "ppoflow.evaluation"
"""Tag of a run in MLflow: the evaluation that it shows."""


def show_in_prefect(evaluation: Artifact) -> None:
    """A Markdown artifact with the numbers, the plots and the answers, if this is part of a flow run."""
    import httpx
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import FlowRunContext
    from prefect.exceptions import PrefectException

    if FlowRunContext.get() is None:
        return
    plots = []
    for plot in PLOTS:
        png = base64.b64encode((evaluation.path / f"{plot}.png").read_bytes()).decode()
        plots.append(f"![{plot}](data:image/png;base64,{png})")  # embedded: there is no server that the page could ask
    numbers, answers = ((evaluation.path / name).read_text(encoding="utf-8") for name in ("report.md", "samples.md"))
    try:
        create_markdown_artifact(
            "\n\n".join(["# Evaluation", numbers, *plots, "# Answers", answers]),
            key="evaluation",
            description="Base model, champion and trained policy on the same held-out prompts",
        )
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("Prefect did not take the evaluation's report (%s); it is in %s.", error, evaluation.path)


def show_in_mlflow(evaluation: Artifact, run_key: str) -> None:
    """Figures, table, report and means in the run of the training; once."""
    try:
        with registry("log the evaluation") as client:
            run_id = find_run(run_key)
            if run_id is None or client.get_run(run_id).data.tags.get(EVALUATION) == evaluation.key:
                return
            for name in FILES:
                client.log_artifact(run_id, str(evaluation.path / name), "evaluation")
            # a table of the same name would be appended to
            client.log_table(run_id, _table(evaluation), f"evaluation/samples-{evaluation.key[:8]}.json")
            for model, means in evaluation.results.items():
                for metric, mean in means.items():
                    client.log_metric(run_id, f"evaluation/{model}/{metric}", mean)
            client.set_tag(run_id, EVALUATION, evaluation.key)
    except (RegistryError, OSError) as error:
        logger.warning("%s The evaluation is in %s and is logged when it is registered.", error, evaluation.path)


def _table(evaluation: Artifact) -> dict[str, list]:
    """Columns of all answers side by side; models answer the same prompts in the same order."""
    results = json.loads((evaluation.path / "report.json").read_text(encoding="utf-8"))
    rows = {
        name: read_jsonl(evaluation.path / "samples" / f"{name}.jsonl")
        for name in ("base", "champion", "policy")
        if results[name] is not None
    }
    columns: dict[str, list] = {name: [row[name] for row in rows["base"]] for name in ("prompt", "ground_truth")}
    for model, answers in rows.items():
        columns |= {f"{model}_{name}": [row[name] for row in answers] for name in ("response", "reward")}
    return columns
