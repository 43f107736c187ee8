"""Flat dictionaries of tensors as torch.distributed.checkpoint directories, written and read without trust.

What DCP leaves open and this closes: its `.metadata` is an unrestricted pickle and its bytes entries are unpickled with
`weights_only=False`, so both could run code; superfluous keys are ignored silently; other types are cast silently; and
what it writes differs from time to time although the tensors do not. Here equal tensors give equal files.
"""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner

from rl_core.checkpoint.metadata import read_metadata
from rl_core.checkpoint.readers import SafeReader, SafetensorsReader
from rl_core.checkpoint.writer import Writer
from rl_core.errors import BrokenArtifact, ModelError, StoreError
from rl_core.together import together


def save_tensors(tensors: dict[str, Tensor], directory: Path, process_group: dist.ProcessGroup | None = None) -> None:
    """Write tensors to a new directory. Collective where torch.distributed is initialised.

    Args:
        tensors: of the models that this rank holds. Of a DTensor each rank writes its shards, of a plain tensor (equal on all
            ranks that have it) one rank its content.
        directory: without a checkpoint; the same on all ranks.
        process_group: of all ranks, to speak over; None: the default one.

    Raises:
        StoreError: a rank could not write (on all ranks).
    """
    for name, tensor in tensors.items():
        assert isinstance(tensor, Tensor), f"{name}: only tensors are stored, not {type(tensor).__name__}"
    planner = DefaultSavePlanner(flatten_state_dict=False)
    write(directory, planner, tensors, alone=not dist.is_initialized(), process_group=process_group)


def load_tensors(
    tensors: dict[str, Tensor],
    directory: Path,
    strict: bool = True,
    *,
    ignored: Iterable[str] = (),
    cast: bool = False,
    alone: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read into `tensors`, in place; each rank reads what its shards need. Collective where torch.distributed is initialised.

    Args:
        tensors: destinations; written by any number of ranks, read by any number. Ranks that hold different models have
            different names.
        strict: refuse a directory that holds more than the `tensors` of all ranks together.
        ignored: names that it may hold although strict.
        cast: convert other types instead of refusing them.
        alone: one process reads for itself, although torch.distributed is initialised.
        process_group: the ranks that read; None: all.

    Raises:
        ModelError: names, shapes or types differ.
        BrokenArtifact: the directory is damaged or holds something else than tensors.
    """

    elsewhere = set() if alone else _names_of_all(tensors, process_group)

    def check() -> None:
        stored = stored_tensors(directory)
        allowed = {*ignored, *elsewhere} if strict else set(stored)
        compare(tensors, stored, directory, ignored=allowed, cast=cast)

    check() if alone else together(check, process_group)
    _read(SafeReader(directory), tensors, alone, process_group)


def load_safetensors(
    tensors: dict[str, Tensor],
    directory: Path,
    *,
    ignored: Iterable[str] = (),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """`load_tensors` from the safetensors files of a Hugging Face directory, converting types; names as in the files."""
    reader = SafetensorsReader(str(directory))

    def check() -> None:
        compare(tensors, _only_tensors(reader.read_metadata(), directory), directory, ignored=set(ignored), cast=True)

    together(check, process_group)
    _read(reader, tensors, alone=False, process_group=process_group)


def stored_tensors(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Names, shapes (`.size`) and types (`.properties.dtype`) of what a DCP directory holds."""
    return _only_tensors(read_metadata(directory), directory)


def compare(
    tensors: dict[str, Tensor], stored: dict[str, TensorStorageMetadata], where: Path, *, ignored: set[str], cast: bool
) -> None:
    """Raise a ModelError naming the first ten differences in names, shapes and (unless `cast`) types."""
    problems = {
        "missing": [name for name in tensors if name not in stored],
        "superfluous": [name for name in stored if name not in tensors and name not in ignored],
        "of another shape": [
            f"{name} {list(stored[name].size)} instead of {list(tensor.shape)}"
            for name, tensor in tensors.items()
            if name in stored and stored[name].size != tensor.shape
        ],
        "of another type": [
            f"{name} {stored[name].properties.dtype} instead of {tensor.dtype}"
            for name, tensor in tensors.items()
            if name in stored and not cast and stored[name].properties.dtype != tensor.dtype
        ],
    }
    if any(problems.values()):
        said = "; ".join(f"{len(names)} {what}: {', '.join(names[:10])}" for what, names in problems.items() if names)
        raise ModelError(
            f"{where}: its tensors are not those of the model ({said}). Use the configuration that they were made with."
        )


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise BrokenArtifact(f"{read_item.dest_index.fqn} is not a tensor.")

    def create_local_plan(self) -> LoadPlan:
        # Shards without elements (more ranks than rows) need nothing.
        plan = super().create_local_plan()
        plan.items = [item for item in plan.items if item.lengths.numel()]
        return plan


def write(
    directory: Path,
    planner: SavePlanner,
    tensors: dict[str, Any],
    alone: bool,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save what `planner` plans; errors of any rank become a StoreError on all."""

    def save() -> None:
        dcp.save(tensors, storage_writer=Writer(directory), planner=planner, process_group=process_group, no_dist=alone)

    _quietly(save, directory, "written", alone)


def _names_of_all(tensors: dict[str, Tensor], process_group: dist.ProcessGroup | None) -> set[str]:
    if not dist.is_initialized():
        return set(tensors)
    names: list[list[str]] = [[]] * dist.get_world_size(process_group)
    dist.all_gather_object(names, list(tensors), group=process_group)
    return {name for part in names for name in part}


def _read(
    reader: FileSystemReader, tensors: dict[str, Tensor], alone: bool, process_group: dist.ProcessGroup | None = None
) -> None:
    planner: LoadPlanner = _Planner(flatten_state_dict=False)
    alone = alone or not dist.is_initialized()
    with torch.no_grad():
        _quietly(
            lambda: dcp.load(dict(tensors), storage_reader=reader, planner=planner, process_group=process_group, no_dist=alone),
            Path(reader.path),
            "read",
            alone,
        )


def _quietly(action: Callable[[], Any], directory: Path, what: str, alone: bool) -> None:
    try:
        if alone:
            with warnings.catch_warnings():  # not in a thread: the filters are the whole process's
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                action()
        else:
            action()
    except CheckpointException as failed:  # carries every rank's error, on every rank
        for error, _ in failed.failures.values():
            if not isinstance(error, Exception):  # Ctrl-C stays Ctrl-C
                raise error from None
        reasons = "; ".join(f"rank {rank}: {error!r}" for rank, (error, _) in sorted(failed.failures.items()))
        raise StoreError(f"{directory} could not be {what} ({reasons}).") from failed
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStream" not in str(error):
            raise  # not the disk's fault: a collective failed, since another rank is gone
        raise StoreError(f"{directory} could not be {what} ({error}).") from error


def _only_tensors(metadata: Metadata, directory: Path) -> dict[str, TensorStorageMetadata]:
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise BrokenArtifact(f"{directory}: {name} is not a tensor; only tensors are stored here.")
        tensors[name] = entry
    return tensors
