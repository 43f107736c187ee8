"""Ranks die with their parent: a flow or a torchrun agent that is killed leaves no process behind.

Standard library only, so that it can be the first thing that a rank does, before seconds of imports.
"""

import ctypes
import os
import signal
import sys

PARENT = "PPOFLOW_PARENT_PID"
"""Environment variable with the pid of the process that a child must not outlive."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent ends.

    It holds for a child whose parent left its pid in `PPOFLOW_PARENT_PID` (taken out of the environment here, it does not
    concern grandchildren) and for ranks of any torchrun. A program started from a shell is left alone: it may well outlive it.
    Linux `prctl(2)`: the setting survives exec, and "parent" is the *thread* that started the child.
    """
    expected = os.environ.pop(PARENT, None)
    if expected is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(expected) if expected is not None else os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # `python process.py COMMAND…`: the command, dying with the parent; prctl's setting survives exec
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
