"""A rank's memory: the most that it used, and giving back what it no longer uses."""

import ctypes
import resource

import torch

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only


def peak() -> int:
    """Most bytes that this rank has used: on the GPU where there is one, else in the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back() -> None:
    """Return freed heap to the system.

    glibc keeps freed blocks of up to 32 MiB – on the CPU that is what FSDP gathers and frees layer by layer – in holes that the
    next phase does not fit into. (Mapping such blocks, by a lower limit, would return them at once, but the page faults took a
    fifth of the time.)
    """
    if _trim is not None:
        _trim(0)
