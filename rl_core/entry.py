"""How a rank's program begins and ends: the libraries that it needs, the log on stdout, an exit code that says what to do next,
one paragraph for a user's mistake, the rank and its phase for anything else.

Standard library only, so that the versions can be looked at before anything is imported that needs them.
"""

import faulthandler
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

from rl_core.errors import (
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER,
    BrokenArtifact,
    ConfigError,
    DataError,
    Interrupted,
    LaunchError,
    ModelError,
    NonFiniteError,
    RewardError,
    StoreError,
)

USER_ERRORS = (ConfigError, LaunchError, DataError, ModelError, RewardError, StoreError, NonFiniteError)
NEEDED = {"torch": (2, 11), "transformers": (5, 17)}
"""The oldest versions that ppoflow is tested with; pyproject.toml says the same to pip."""
COLLECTIVE_ERRORS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


def require_libraries() -> None:
    """End the program with a message for the user where a library is missing or too old.

    Called before the imports of a rank's program: with old libraries these would fail with a traceback.
    """
    try:
        check_libraries({name: _version(name) for name in NEEDED})
    except ConfigError as error:
        _say(f"ppoflow: error: {error}")
        sys.exit(EXIT_USER)


def check_libraries(found: Mapping[str, str | None]) -> None:
    """Compare the installed versions with the needed ones.

    Args:
        found: version by name; None: not installed. Only its first two numbers count.

    Raises:
        ConfigError: one is missing or too old. It names what is there and what is needed.
    """
    wrong = []
    for name, (major, minor) in NEEDED.items():
        version = found[name]
        numbers = re.match(r"(\d+)\.(\d+)", version or "")
        if numbers is None or (int(numbers[1]), int(numbers[2])) < (major, minor):
            wrong.append(f"{name} {version} is installed" if version else f"{name} is not installed")
    if wrong:
        needed = ", ".join(f"{name} >= {major}.{minor}" for name, (major, minor) in NEEDED.items())
        raise ConfigError(
            f"{' and '.join(wrong)} in {sys.prefix}, but ppoflow needs {needed}. Install the pinned ones: "
            "pip install -r infra/requirements.txt."
        )


def run_program(main: Callable[[Sequence[str]], None]) -> None:
    """Call `main` with the command line and exit: 0 done, 2 the user's turn, 75 interrupted and saved, else traceback and 1.

    It ends without waiting for threads or collectives of a group in which another rank may be dead.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for noisy in ("httpx", "fsspec", "datasets", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    faulthandler.enable()  # NCCL ends a rank whose collective times out by SIGABRT: its Python stack tells the phase
    code = EXIT_DONE
    try:
        main(sys.argv[1:])
    except Interrupted as error:
        _say(f"ppoflow: {error}")
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 – whatever it is, the process ends here
        if isinstance(error, USER_ERRORS) and not isinstance(error, BrokenArtifact):  # that one is mended by running again
            _say(f"ppoflow: error: {error}")
            code = EXIT_USER
        elif (full := _disk(error)) is not None:
            _say(f"ppoflow: error: {_place()} could not write: {full}")
            code = EXIT_USER
        else:
            sys.excepthook(type(error), error, error.__traceback__)
            _say(f"ppoflow: {_place()} ended by {type(error).__name__}.{_explained(error)}")
            code = EXIT_CRASH
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _place() -> str:
    stall = sys.modules.get("rl_core.stall")
    return stall.where() if stall is not None else f"rank {os.environ.get('RANK', '0')}"


def _disk(error: Exception) -> str | None:
    """What is to be done where a full or read-only disk is behind an error, whichever file was being written."""
    from rl_core.artifacts import refusal, remedy

    refused = refusal(error)
    return None if refused is None else f"{error}. {remedy(refused)}"


def _explained(error: Exception) -> str:
    """What a lack of memory or a broken collective means; the latter says nothing of its cause, which lies with another rank."""
    if "out of memory" in str(error) or "can't allocate memory" in str(error):
        return (
            " It ran out of memory. Less is needed with: trainer.per_device_train_batch_size or max_tokens_per_micro_batch "
            "lower, fsdp.activation_checkpointing, fsdp.optimizer_offload or param_offload (updates); rollout.batch_size or "
            "max_new_tokens lower (gen); more ranks. None of them but max_new_tokens changes the result: running again goes on."
        )
    if not isinstance(error, RuntimeError) or not any(word in str(error).lower() for word in COLLECTIVE_ERRORS):
        return ""
    return (
        " Its communication with the other ranks broke: one of them died (look for the first error in the log) or did not come "
        "to the same point within launch.dist_timeout_s. Running the same command again goes on from the last checkpoint."
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _say(paragraph: str) -> None:
    """One line in one write: several ranks speak at once, and whoever reads the log takes a line for the whole message."""
    sys.stdout.write(" ".join(paragraph.split()) + "\n")
    sys.stdout.flush()
