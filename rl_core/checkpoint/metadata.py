"""Reads DCP's `.metadata`, a pickle, through an unpickler that knows only what DCP writes for tensors."""

import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from rl_core.errors import BrokenArtifact

NAME = ".metadata"
_CLASSES = (
    metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
    metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo, torch.Size, pathlib.PosixPath,
)  # fmt: skip
_ADMITTED: dict[tuple[str, str], Any] = {(known.__module__, known.__qualname__): known for known in _CLASSES}
_ADMITTED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ADMITTED |= {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # as Python 3.13 writes it
}
_DAMAGE = (OSError, pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, ValueError, TypeError, KeyError)
"""What reading a damaged pickle raises (documentation of `pickle.UnpicklingError`)."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of tensors does") from None


def read_metadata(directory: Path) -> Metadata:
    """The `.metadata` of a DCP directory; nothing in it is run, and it names files of this directory only.

    Raises:
        BrokenArtifact: it is missing, damaged, or names anything that DCP does not write for tensors.
    """
    path = directory / NAME
    try:
        with path.open("rb") as file:
            read = _Unpickler(file).load()
    except _DAMAGE as error:
        raise BrokenArtifact(f"{path} cannot be read: {error}.") from error
    if not isinstance(read, Metadata) or not isinstance(read.storage_data, dict):
        raise BrokenArtifact(f"{path} is not the metadata of a checkpoint.")
    for info in read.storage_data.values():
        if not isinstance(info, filesystem._StorageInfo) or Path(info.relative_path).name != info.relative_path:
            raise BrokenArtifact(f"{path} names a file outside of its directory.")
        if not (directory / info.relative_path).is_file():
            raise BrokenArtifact(f"{directory}: {info.relative_path} is missing.")
    return read
