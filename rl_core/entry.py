"""How a rank's program ends: the log on stdout, an exit code that says what to do next, one paragraph for a user's mistake."""

import logging
import os
import sys
from collections.abc import Callable, Sequence

from rl_core.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER,
    BrokenArtifact,
    ConfigError,
    DataError,
    Interrupted,
    ModelError,
    NonFiniteError,
    RewardError,
    StoreError,
)

USER_ERRORS = (ConfigError, DataError, ModelError, RewardError, StoreError, NonFiniteError)


def run_program(main: Callable[[Sequence[str]], None]) -> None:
    """Call `main` with the command line and exit: 0 done, 2 the user's turn, 75 interrupted and saved, else traceback and 1.

    It ends without waiting for threads or collectives of a group in which another rank may be dead.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for noisy in ("httpx", "fsspec", "datasets", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    code = EXIT_DONE
    try:
        main(sys.argv[1:])
    except Interrupted as error:
        _say(f"ppoflow: {error}")
        code = EXIT_INTERRUPTED
    except USER_ERRORS as error:
        if isinstance(error, BrokenArtifact):
            raise  # not the user's doing: running again sets it aside
        _say(f"ppoflow: error: {error}")
        code = EXIT_USER
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(paragraph: str) -> None:
    """One line in one write: several ranks speak at once, and whoever reads the log takes a line for the whole message."""
    sys.stdout.write(" ".join(paragraph.split()) + "\n")
    sys.stdout.flush()
