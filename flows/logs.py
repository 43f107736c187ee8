"""What of Prefect's log a person sees: errors that speak for themselves lose their traceback; a shell user gets them once.

`PPOFLOW_TRACEBACK=1` (or `ppoflow --traceback …`) leaves everything in.
"""

import logging
import os
import time
import traceback
from pathlib import Path

from rl_core.errors import PpoflowError
from rl_core.home import home, writable

TRACEBACK = "PPOFLOW_TRACEBACK"
PREFECT_LOGGERS = ("prefect", "prefect.flow_runs", "prefect.task_runs", "prefect.engine")

SAID_BY_THE_CLI = (
    "Task run failed", "Encountered exception", "Finished in state Failed", "Finished in state Crashed", "Crash detected!",
)  # fmt: skip
CHATTER = ("temporary server", "Still processing items")


def set_up() -> None:
    """Show what the stages report, and drop the tracebacks of `PpoflowError`s, on the console and in Prefect's UI.

    To be called after Prefect is imported (`PREFECT_LOGGING_EXTRA_LOGGERS` gives our loggers its handlers, not its level).
    """
    for name in ("tasks", "rl_core"):
        logging.getLogger(name).setLevel(logging.INFO)
    if not os.environ.get(TRACEBACK):
        for name in PREFECT_LOGGERS:
            logging.getLogger(name).addFilter(_without_traceback)


def quiet_console() -> None:
    """Keep off the console what the CLI says itself in the end (the error) and what concerns nobody (embedded server)."""
    if not os.environ.get(TRACEBACK):
        for handler in logging.getLogger().handlers:
            handler.addFilter(_worth_reading)


def write_traceback(error: BaseException) -> Path:
    """Keep the traceback of an unforeseen error under `PPOFLOW_HOME/logs`; returns the file."""
    path = writable(home() / "logs") / time.strftime(f"error-%Y%m%d-%H%M%S-{os.getpid()}.log")
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return path


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], PpoflowError):
        record.exc_info = None
    return True


def _worth_reading(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(SAID_BY_THE_CLI) and not any(words in str(record.msg) for words in CHATTER)
