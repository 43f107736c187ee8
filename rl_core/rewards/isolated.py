"""Runs a judge in a process of its own (`rl_core.rewards.worker`), which is ended when a response takes too long."""

import os
import random
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rl_core
from rl_core import errors
from rl_core.errors import ConfigError
from rl_core.process import PARENT
from rl_core.rewards.judgement import Failure, Judgement, Sample

LOAD_SECONDS = 300.0
"""Longest wait for a judge to be loaded: a user's file may import torch and read a model."""


class IsolatedJudge:
    """A judge in a process of its own, one call at a time. The process starts here and stays; one that had to be ended is started
    anew for the next response. It dies with the thread that started it.

    Args:
        field: the section, for messages.
        timeout_s: seconds for one list of samples.

    Attributes:
        batched: as of the judge.

    Raises:
        ConfigError, RewardError: the judge cannot be made.
    """

    def __init__(self, kind: str, settings: dict[str, Any], timeout_s: float, field: str) -> None:
        self._kind, self._settings, self._timeout_s, self._field = kind, settings, timeout_s, field
        self._channel: Connection | None = None
        self._owed = 0  # answers to what was asked
        self.batched: bool = self._start()

    def run(self, chunks: list[list[Sample]]) -> Iterator[list[Judgement | Failure] | Failure]:
        """One answer for each list of samples. Random draws of the judge depend on the state of Python's global generator here,
        which is seeded at each step, and on the number of the list: not on what was ended before.
        """
        if self._owed:  # whoever asked last has stopped listening
            self._end()
        seed, done = random.getrandbits(63), 0
        while done < len(chunks):
            if self._channel is None:
                self._start()
            assert self._channel is not None
            with suppress(ConnectionError):  # it is gone, as is found out when it should answer
                self._channel.send((seed, done, chunks[done:]))
            self._owed = len(chunks) - done
            while self._owed:
                answer = self._receive(self._channel)
                done += 1
                yield answer

    def _receive(self, channel: Connection) -> list[Judgement | Failure] | Failure:
        if not channel.poll(self._timeout_s):
            self._end()
            said = f"takes longer than {self._field}.timeout_s = {self._timeout_s:g} s"
            return Failure("timeout", said, "Mend it, or allow more.")
        try:
            answer = channel.recv()
            self._owed -= 1
            return answer
        except (EOFError, ConnectionError):
            return Failure("error", f"ends its process ({self._end()})", "Mend it; only its result may leave it.")

    def _start(self) -> bool:
        ours, theirs = socket.socketpair()
        root = str(Path(rl_core.__file__).parents[1])
        places = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl_core.rewards.worker", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": places, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that what it starts itself is ended with it
            )
        self._channel = Connection(ours.detach())
        self._stop = weakref.finalize(self, _stop, process, self._channel, os.getpid())
        try:
            self._channel.send((sys.path, self._kind, self._settings))
            if not self._channel.poll(LOAD_SECONDS):
                raise ConfigError(f"{self._field}: loading it takes longer than {LOAD_SECONDS:g} s.")
            said = self._channel.recv()
        except (EOFError, ConnectionError):
            raise ConfigError(f"{self._field}: its process ended while it was loaded ({self._end()}).") from None
        except ConfigError:
            self._end()
            raise
        if isinstance(said, bool):
            return said
        self._end()
        name, message = said
        raise getattr(errors, name)(message)

    def _end(self) -> str:
        """End the process and say how it ended."""
        self._channel, self._owed = None, 0
        return str(self._stop())


def _stop(process: "subprocess.Popen[bytes]", channel: Connection, parent: int) -> str:
    channel.close()
    if os.getpid() != parent:  # a fork of the parent ends: the process is not its own
        return ""
    with suppress(subprocess.TimeoutExpired):  # one that ended by itself, and is about to be known as such
        process.wait(timeout=0.1 if process.poll() is None else 0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
