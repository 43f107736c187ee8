"""The prompts of a committed dataset, memory-mapped, and the order in which training takes them."""

import bisect
import functools
import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_core.data import values
from rl_core.data.shards import SPLITS
from rl_core.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model and the reward get it."""

    prompt_id: str
    """sha256 (hex) of the row's messages and answer."""
    input_ids: list[int]
    """With chat template and generation prompt, after truncation."""
    text: str
    """What `input_ids` were made of, special tokens shown; of a prompt that was cut, those that are left, decoded."""
    question: str
    """The last user message."""
    ground_truth: str | None
    data_source: str
    extra_info: dict[str, Any]
    """All other columns of the row."""


class Prompts:
    """The prompts of one side of a dataset directory, in the source's order.

    Args:
        directory: a dataset as `rl_core.data.tokenize` writes it.
        split: `train` or `eval`.

    Raises:
        DataError: there are no shards.
    """

    def __init__(self, directory: Path, split: str) -> None:
        assert split in SPLITS, split
        paths = sorted((directory / split).glob("shard-*.arrow"))
        if not paths:
            raise DataError(f"{directory} holds no {split} prompts; it must be a dataset written by the stage tokenize_dataset.")
        batches = [batch for path in paths for batch in pa.ipc.open_stream(pa.memory_map(str(path))).read_all().to_batches()]
        self._batches = batches
        self._ends = list(itertools.accumulate(batch.num_rows for batch in batches))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        batch = self._batches[number]
        row = batch.slice(index - self._ends[number] + batch.num_rows, 1).to_pylist()[0]
        return Prompt(**{**row, "extra_info": values.loads(row["extra_info"])})

    def greatest_id(self) -> int:
        """The greatest token id in any prompt."""
        return max(pc.max(batch["input_ids"].flatten()).as_py() or 0 for batch in self._batches)

    def order(self, seed: int, epoch: int) -> list[int]:
        """The indices in the order of an epoch: a permutation that depends on `seed`, `epoch` and the number of prompts only."""
        return _permutation(len(self), seed, epoch).tolist()

    def take(self, seed: int, offset: int, count: int, shuffle: bool = True) -> list[Prompt]:
        """`count` prompts from the global cursor `offset` on, through as many epochs as needed; in the source's order unless
        `shuffle`."""
        positions = (divmod(position, len(self)) for position in range(offset, offset + count))
        return [self[int(_permutation(len(self), seed, epoch)[place]) if shuffle else place] for epoch, place in positions]


@functools.lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Sorts the indices by a SplitMix64 stream (Steele et al. 2014, doi:10.1145/2660193.2660195) begun at a sha256 of
    seed and epoch: integers only, so no version of any library changes it."""
    start = np.uint64(int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little"))
    state = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")
