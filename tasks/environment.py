"""The environment of a ppoflow process, set before Prefect, MLflow or a Hugging Face library is imported.

They read their settings at import, and Prefect reads pyproject's `[tool.prefect]` only in the project's root. What the user
has set is left as it is. Everything that they write goes under `PPOFLOW_HOME`; nothing calls home.
"""

import os

from rl_core.home import home, writable


def prepare() -> None:
    """Set what is not set yet. First thing in every entry point that uses Prefect or MLflow.

    Raises:
        StoreError: `PPOFLOW_HOME` cannot be written.
    """
    os.environ["PPOFLOW_HOME"] = str(home())  # absolute from here on: children may have another working directory
    writable(home() / "mlflow")  # sqlite makes no directories
    for name, value in _defaults().items():
        os.environ.setdefault(name, value)
    if "HF_HOME" not in os.environ:  # not HF_HOME itself: the user's token lies there
        os.environ.setdefault("HF_HUB_CACHE", str(home() / "downloads" / "hub"))
        os.environ.setdefault("HF_DATASETS_CACHE", str(home() / "downloads" / "datasets"))


def _defaults() -> dict[str, str]:
    return {
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MPLCONFIGDIR": str(home() / "matplotlib"),
        # Prefect
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",  # it asks a host on the internet even with analytics off
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",  # a first start migrates its database for 20 s
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # sqlite's lock, on a machine that is busy training
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,rl_core",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s | %(message)s",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s | %(message)s",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s | %(task_name)s: %(message)s",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        # MLflow
        "MLFLOW_TRACKING_URI": f"sqlite:///{home()}/mlflow/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # a dead tracking server would block each call for four minutes
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }
