"""torchrun's agent as a child of the flow: `python -m tasks.agent <torchrun's arguments>`.

Two things differ from the `torchrun` command: it is killed by the kernel when the flow's process dies, whatever the reason,
and its exit code says what the ranks' exit codes mean (`rl_core.errors`) where torchrun always says 1.
"""

import os
import signal
import sys

from rl_core.errors import EXIT_CRASH, EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER
from rl_core.process import PARENT, die_with_parent


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; returns the exit code."""
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # for the ranks
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except SignalException:
        return EXIT_INTERRUPTED
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0:
                print(f"rank {rank} was killed by {signal.Signals(-code).name}", flush=True)
        return verdict(set(codes.values()))
    return EXIT_DONE


def verdict(codes: set[int]) -> int:
    """One exit code from those of the ranks that failed; negative ones are signals. A rank whose peers went away ends as a
    crash, so a user error or an interruption of any rank explains the others; a rank that was killed explains all."""
    if any(code < 0 and code != -signal.SIGTERM for code in codes):
        return EXIT_CRASH
    if EXIT_USER in codes:
        return EXIT_USER
    if codes <= {EXIT_INTERRUPTED, -signal.SIGTERM}:
        return EXIT_INTERRUPTED
    return EXIT_CRASH


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
