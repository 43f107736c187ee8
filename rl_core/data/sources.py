"""The rows of a source, in a fixed order, and what identifies them.

`source_fingerprint` is part of the stage's key and runs in every fully cached run: it imports neither `datasets` nor
reasoning-gym nor torch.
"""

import difflib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.config.data import DataConfig, FilesSource, HubSource, ReasoningGymSource
from rl_core.data import values
from rl_core.data.files import file_format, load, local_files
from rl_core.data.generate import generate, version
from rl_core.digests import digest_files, digest_json
from rl_core.errors import DataError
from rl_core.home import home, writable

_SLICE = 1000


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read from any index on."""

    name: str
    """What reward functions get as `data_source` where no column says it."""
    columns: list[str]
    count: int
    read: Callable[[int, int], Iterator[dict[str, Any]]]
    """`read(start, stop)`"""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.read(0, self.count)


def read_rows(config: DataConfig) -> RowSource:
    """Open the source and check its columns.

    Raises:
        ConfigError: the source names a file, format, generator or option that does not exist.
        DataError: unreadable or empty source, or a column that it does not have.
    """
    source = config.source
    if isinstance(source, ReasoningGymSource):
        rows = _generated(source)
    elif isinstance(source, FilesSource):
        before = source_fingerprint(config)
        files = local_files(source)
        table = load(files, file_format(source, files), home() / "datasets" / digest_json(before)[:32])
        if source_fingerprint(config) != before:
            raise DataError(f"data.source.path: {source.path} was changed while it was read; run again when it is finished.")
        rows = _tabular("files", table)
    else:
        rows = _tabular(source.name, _hub(source))
    if not rows.count:
        raise DataError(f"data.source: {rows.name} has no rows.")
    for field in ("prompt_column", "answer_column", "data_source_column"):
        column = getattr(config, field)
        if column is not None and column not in rows.columns:
            close = difflib.get_close_matches(column, rows.columns, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]}?" if close else ""
            without = " Set it to null where there is none." if field == "answer_column" else ""
            raise DataError(
                f"data.{field} = {column!r}: the data has no such column, only {', '.join(rows.columns)}{hint or '.'}{without}"
            )
    return rows


def source_fingerprint(config: DataConfig) -> dict[str, Any]:
    """What the rows are, as JSON: digests of the files in order, the hub's commit, or the generator's settings and version.

    Raises:
        ConfigError: no such file, or the generators are not installed.
        DataError: a remote source cannot be reached.
    """
    source = config.source
    if isinstance(source, ReasoningGymSource):
        return {**source.model_dump(mode="json"), "version": version()}
    if isinstance(source, FilesSource):
        files = local_files(source)
        kind = file_format(source, files)
        try:
            digests = digest_files(files)
        except OSError as error:
            raise DataError(f"data.source.path: {error.filename} cannot be read ({error.strerror}).") from None
        return {"kind": "files", "format": kind, "files": [digests[file] for file in files]}
    return {"kind": "hub", "name": source.name, "subset": source.subset, "split": source.split, "commit": _commit(source)}


def _generated(source: ReasoningGymSource) -> RowSource:
    path = generate(source)

    def read(start: int, stop: int) -> Iterator[dict[str, Any]]:
        with path.open(encoding="utf-8") as file:
            yield from map(values.loads, itertools.islice(file, start, stop))

    return RowSource(source.dataset, list(next(read(0, 1))), source.size, read)


def _tabular(name: str, table: Any) -> RowSource:
    def read(start: int, stop: int) -> Iterator[dict[str, Any]]:
        for begin in range(start, stop, _SLICE):
            columns = table[begin : min(begin + _SLICE, stop)]
            for row in zip(*columns.values(), strict=True):
                yield dict(zip(columns, row, strict=True))

    return RowSource(name, list(table.column_names), len(table), read)


def _hub(source: HubSource) -> Any:
    import datasets

    commit = _commit(source)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            source.name, source.subset, split=source.split, revision=commit, cache_dir=str(writable(home() / "datasets" / "hub"))
        )
    except (datasets.exceptions.DatasetsError, ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500].rstrip(".")
        raise DataError(
            f"data.source: {source.name} (subset {source.subset}, split {source.split}, commit {commit}) cannot be read: "
            f"{reason}. Check data.source.subset and data.source.split, and that the hub can be reached."
        ) from error


def _commit(source: HubSource) -> str:
    """The commit that the revision stands for; a full commit is taken as it is, without asking."""
    if source.revision is not None and re.fullmatch(r"[0-9a-f]{40}", source.revision):
        return source.revision
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.name, revision=source.revision, timeout=30).sha
    except Exception as error:  # the client's transport errors are of another library in each major version
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"data.source.name = {source.name}, revision {source.revision or 'newest'}: the Hugging Face hub does not give it "
            f"({reason}). Check name, network and HF_TOKEN. Where data.source.revision is a full commit, a run whose stages are "
            "all cached needs no hub; data.source.kind = files never does."
        ) from error
    assert commit is not None
    return commit
