"""Writes a rank's part of a DCP directory: files of bounded size, two at a time, each hashed while the next one is written."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

from rl_core.digests import digest_file

FILE_BYTES = 2**28
"""A file is closed when it has reached this size."""
AT_A_TIME = 2
"""While one file waits for the disk (fsync), another is serialised or hashed."""


class Writer(FileSystemWriter):
    """Equal tensors give equal files: no ids or paths in `.metadata`, whichever file is ready first.

    The threads are ours because DCP's own (`thread_count`) lose the exceptions of all but one: after a full disk tensors would be
    missing without an error.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, per_thread_copy_ahead=0)  # its loader would take the first GPU, whichever the rank's is

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        def write(number: int, bundle: list[WriteItem]) -> list[Any]:
            name = f"{plan.storage_data.prefix}{number}.distcp"
            path, files = Path(self.path) / name, Queue[Any]()
            files.put((path, name, bundle))
            written = self._write_data(planner, files).value()
            digest_file(path)  # remembered: the commit need not read it again
            return written

        bundles = list(_bundles(plan))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            parts = list(pool.map(write, range(len(bundles)), bundles))
        done: Future[list[Any]] = Future()
        done.set_result([result for part in parts for result in part])
        return done

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _bundles(plan: SavePlan) -> Iterator[list[WriteItem]]:
    bundle: list[WriteItem] = []
    size = 0
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is not a tensor"
        size += data.chunk.sizes.numel() * data.properties.dtype.itemsize
        bundle.append(item)
        if size >= FILE_BYTES:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle
