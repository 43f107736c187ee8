"""Whether a machine can run ppoflow: one small function for each thing that can be missing, and what mends it.

What a check looks at can be given to it, so that any machine can be judged from any other. Nothing heavy is imported before it is
looked at: a torch that is too old or broken is a finding like others.
"""

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rl_core.entry import NEEDED
from rl_core.errors import PpoflowError
from rl_core.home import home, writable

ROOT = Path(__file__).resolve().parents[2]
PINS = "pip install -r infra/requirements.txt"
TESTED = {"torch": (2, 13), "transformers": (5, 24)}
"""The newest versions that ppoflow was tested with; `rl_core.entry.NEEDED` has the oldest."""
LITTLE_DISK, SOME_DISK = 2e9, 20e9
"""Bytes with which nothing can be done, and those of a model with 1.5 billion parameters and a checkpoint of it."""


@dataclass(frozen=True)
class Check:
    """What was found of one thing."""

    name: str
    state: Literal["pass", "warn", "fail", "skip"]
    """`warn`: ppoflow runs, but not as well as it could. `skip`: not looked at, since something that it needs failed."""
    found: str
    remedy: str = ""
    """What to do, where something is wrong."""


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The check, or that it failed itself: an error never hides the checks behind it."""
    try:
        return check()
    except PpoflowError as error:
        return refused(name, error)
    except Exception as error:  # noqa: BLE001 – of whatever is broken on this machine
        return Check(name, "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "See the words of the error.")


def refused(name: str, error: PpoflowError, otherwise: str = "Mend what it names.") -> Check:
    """A failed check of an error for users, which says first what is wrong and then what mends it.

    Args:
        otherwise: the remedy of an error that has none.
    """
    found, dot, remedy = str(error).partition(". ")
    return Check(name, "fail", found + dot.strip(), remedy or otherwise)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """3.11 or 3.12."""
    found = f"{version[0]}.{version[1]} ({sys.prefix})"
    if (3, 11) <= version < (3, 13):
        return Check("python", "pass", found)
    return Check("python", "fail", found, "Make an environment with Python 3.11 or 3.12: make PYTHON=python3.12 setup")


def installed_version(name: str) -> str | None:
    """Of a package; None: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(
    requirements: Sequence[str] | None = None, version_of: Callable[[str], str | None] = installed_version
) -> Check:
    """Each package that ppoflow requires is there, in a version that it was tested with.

    Args:
        requirements: as pip reads them; default: those of the installed ppoflow.
        version_of: the installed version of a package; None: not installed.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    wanted = [Requirement(text) for text in (_own_requirements() if requirements is None else requirements)]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = {each.name: version_of(each.name) for each in wanted}
    wrong = [
        f"{each.name} {found[each.name] or 'is missing'} (needed {each.specifier})"
        for each in wanted
        if not found[each.name] or not each.specifier.contains(found[each.name] or "", prereleases=True)
    ]
    if wrong:
        return Check("packages", "fail", "; ".join(wrong), f"Install the pinned ones: {PINS}")
    newer = [
        f"{name} {found[name]} (tested up to {major}.{minor})"
        for name, (major, minor) in TESTED.items()
        if name in found and Version(found[name] or "").release[:2] > (major, minor)
    ]
    if newer:
        remedy = f"If something fails, take the pinned ones: {PINS}"
        return Check("packages", "warn", f"newer than tested: {'; '.join(newer)}", remedy)
    shown = ", ".join(f"{name} {found[name]}" for name in NEEDED if name in found)
    return Check("packages", "pass", f"{len(wanted)} as required: {shown}")


def check_torch() -> Check:
    """torch can be imported and shards (FSDP2)."""
    try:
        import torch
        from torch.distributed.fsdp import fully_shard
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        return Check("torch", "fail", f"cannot be used: {type(error).__name__}: {reason}", f"Install it again: {PINS}")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU"
    return Check("torch", "pass", f"{torch.__version__}, {build}, with FSDP2 ({fully_shard.__name__})")


def check_home(directory: Path | None = None) -> Check:
    """PPOFLOW_HOME can be written, and files in it locked and renamed.

    Raises:
        StoreError: it cannot be made or written.
    """
    directory = writable(directory or home())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as scratch:
            descriptor = os.open(Path(scratch) / "file", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)
            (Path(scratch) / "made").mkdir()
            os.rename(Path(scratch) / "made", Path(scratch) / "renamed")
    except OSError as error:
        remedy = "Set PPOFLOW_HOME to a directory on a file system with locks (local, NFS 4, Lustre mounted with flock)."
        return Check("store", "fail", f"{directory} cannot be locked or renamed in ({error.strerror})", remedy)
    return Check("store", "pass", f"{directory} is writable")


def check_disk(directory: Path | None = None, free: int | None = None) -> Check:
    """Room in PPOFLOW_HOME for models and checkpoints; `free` in bytes."""
    directory = directory or home()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(place).free if free is None else free
    found = f"{free / 1e9:.1f} GB free in {place}"
    if free >= SOME_DISK:
        return Check("disk", "pass", found)
    remedy = (
        "Make room, or set PPOFLOW_HOME to a larger disk. A checkpoint takes 12 bytes for each parameter of actor and critic."
    )
    return Check("disk", "fail" if free < LITTLE_DISK else "warn", found, remedy)


def own_path() -> dict[str, str]:
    """The environment variable by which a child finds this package."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _own_requirements() -> list[str]:
    """Of the installed ppoflow; where it runs from its directory without being installed, what a rank asks for."""
    try:
        own = metadata.requires("ppoflow") or []
    except metadata.PackageNotFoundError:
        own = []
    known = {re.split(r"[^\w.-]", text)[0] for text in own}
    return own + [f"{name}>={major}.{minor}" for name, (major, minor) in NEEDED.items() if name not in known]
