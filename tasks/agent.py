"""torchrun's agent as a child of the flow: `python -m tasks.agent <torchrun's arguments>`.

Two things differ from the `torchrun` command: it is killed by the kernel when the flow's process dies, whatever the reason,
and its exit code says what the ranks' exit codes mean (`rl_core.errors`) where torchrun always says 1.
"""

import os
import signal
import sys
from collections.abc import Callable

from rl_core.errors import EXIT_CRASH, EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER
from rl_core.process import PARENT, die_with_parent

LATER_SECONDS = 3
"""A rank that dies this long after the first failure did not cause it."""


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; returns the exit code."""
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # for the ranks
    from torch.distributed.run import parse_args, run

    return supervised(lambda: run(parse_args(arguments)))


def supervised(run: Callable[[], object]) -> int:
    """Let torchrun's agent run the ranks; returns the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except SignalException:
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0:
                print(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}", flush=True)
        _, first = error.get_first_failure()
        return verdict([(failure.timestamp - first.timestamp, failure.exitcode) for failure in error.failures.values()])
    return EXIT_DONE


def verdict(failures: list[tuple[int, int]]) -> int:
    """One exit code from the ranks that failed.

    A rank that was killed explains the others, whatever they say: their peer went away. Not so one that was killed later
    because it did not heed the end of the others. Then a user error or an interruption of any rank explains the crashes.

    Args:
        failures: of each rank, seconds after the first failure (torchrun notes whole ones) and exit code, negative for a signal.
    """
    if any(code < 0 and code != -signal.SIGTERM and seconds < LATER_SECONDS for seconds, code in failures):
        return EXIT_CRASH
    codes = {code for _, code in failures if code >= 0 or code == -signal.SIGTERM}
    if EXIT_USER in codes:
        return EXIT_USER
    if codes <= {EXIT_INTERRUPTED, -signal.SIGTERM}:
        return EXIT_INTERRUPTED
    return EXIT_CRASH


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
