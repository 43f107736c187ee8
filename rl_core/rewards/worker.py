"""A process that judges responses, so that one that hangs or crashes can be ended: `python -m rl_core.rewards.worker FD`.

It reads from the socket FD: `sys.path`, kind and settings of the judge; then jobs `(seed, number of the first, lists of
samples)`. It writes whether the judge is ready, then one answer for each list. It needs the standard library only, and what its
judge needs.
"""

# ruff: noqa: E402 – it must be bound to its parent first
from rl_core.process import die_with_parent

die_with_parent()

import io
import os
import random
import sys
from multiprocessing.connection import Connection
from typing import Any

from rl_core.errors import PpoflowError
from rl_core.rewards.judges import attempt, make_judge


def main(descriptor: int) -> None:
    """Judge until the parent closes the socket."""
    os.set_inheritable(descriptor, False)  # a process that the user's function starts and leaves must not hold it
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it prints must not be lost when it is ended
    channel = Connection(descriptor)
    path, kind, settings = channel.recv()
    sys.path[:] = path
    try:
        judge = make_judge(kind, settings)
    except PpoflowError as error:
        channel.send((type(error).__name__, str(error)))
        return
    channel.send(judge.batched)
    while True:
        try:
            seed, first, chunks = channel.recv()
        except EOFError:
            return
        for number, samples in enumerate(chunks, start=first):
            seed_generators(f"{seed}:{number}")
            channel.send(without_errors(attempt(judge, samples)))


def seed_generators(text: str) -> None:
    """Seed the global generators of those libraries that are loaded."""
    random.seed(text)
    number = random.getrandbits(32)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def without_errors(result: Any) -> Any:
    """Failures without the exception, which need not survive pickling."""
    return result._replace(error=None) if hasattr(result, "error") else result


if __name__ == "__main__":
    main(int(sys.argv[1]))
