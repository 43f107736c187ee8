"""Files of rows: which they are, where they lie on this machine, and their rows through `datasets`.

Remote files are copied once under `PPOFLOW_HOME/datasets/remote`, named by what the remote side says of them (size, times,
ETag), so that a changed one is copied again and all else works on local files: digests by content, memory-mapped reading.
"""

import contextlib
import csv
import difflib
import glob
import os
from pathlib import Path
from typing import Any

from rl_core.config.data import FilesSource
from rl_core.digests import digest_json
from rl_core.errors import ConfigError, DataError
from rl_core.home import home, writable

FORMATS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_STAMPS = {"etag", "mtime", "lastmodified", "last-modified", "last_modified", "created", "updated", "crc", "sha", "blob_id"}
"""What tells the versions of a remote file apart; a file without any of them is copied each time."""


def local_files(source: FilesSource) -> list[Path]:
    """The files that `path` names, in the order of their names, on this machine.

    Raises:
        ConfigError: no such file, nothing matches, or it is a directory.
        DataError: the remote side cannot be read.
    """
    if "://" in source.path or "::" in source.path:
        return _remote(source.path)
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        raise ConfigError(
            f"data.source.path = {source.path}: this is a directory; name its files, e.g. {source.path.rstrip('/')}/*.jsonl."
        )
    if os.path.exists(path):
        return [Path(path)]
    if glob.has_magic(path):
        if found := sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name)):
            return [Path(name) for name in found]
        raise ConfigError(f"data.source.path = {source.path}: no file matches (looked from {os.getcwd()}).")
    raise ConfigError(
        f"data.source.path = {source.path}: there is no such file (looked from {os.getcwd()}){_neighbour(Path(path))}."
    )


def file_format(source: FilesSource, files: list[Path]) -> str:
    """`json`, `csv`, `parquet` or `arrow`: as configured, else by the endings.

    Raises:
        ConfigError: unknown ending, or endings that differ.
    """
    if source.format is not None:
        return source.format
    found = set()
    for file in files:
        endings = [ending for ending in file.suffixes if ending not in COMPRESSED]
        ending = endings[-1].lower() if endings else ""
        if ending not in FORMATS:
            raise ConfigError(
                f"data.source.path: the ending of {file.name} is none of {', '.join(FORMATS)}; set data.source.format to "
                "json (JSON Lines too), csv, parquet or arrow."
            )
        found.add(FORMATS[ending])
    if len(found) > 1:
        raise ConfigError(
            f"data.source.path = {source.path} matches files of several formats ({', '.join(sorted(found))}); name one kind."
        )
    return found.pop()


def load(files: list[Path], kind: str, cache: Path) -> Any:
    """The files' rows as one `datasets.Dataset`, converted under `cache` where they are not there yet.

    Raises:
        DataError: a file cannot be read as `kind`, or there are no rows.
    """
    import datasets
    import pyarrow

    names = ", ".join(str(file) for file in files[:3]) + (", …" if len(files) > 3 else "")
    if not any(file.stat().st_size for file in files):
        raise DataError(f"data.source.path: {names} is empty; it needs at least two rows.")
    datasets.disable_progress_bars()
    try:
        settings: dict[str, Any] = {}
        if kind == "csv":  # it has no types: "007", "NA" and "None" stay the texts that they are
            text = datasets.Value("string")
            settings = {"features": datasets.Features({name: text for name in _header(files[0])}), "keep_default_na": False}
        return datasets.load_dataset(
            kind, data_files={"train": [str(file) for file in files]}, split="train", cache_dir=str(writable(cache)), **settings
        )
    except StopIteration:  # datasets on a file without any row
        raise DataError(f"data.source.path: {names} has no rows.") from None
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, ValueError, TypeError, KeyError, OSError) as error:
        if "corresponds to no data" in str(error):
            raise DataError(f"data.source.path: {names} has no rows.") from None
        reason = " ".join(str(error.__cause__ or error).split())[:500].rstrip(".")
        raise DataError(
            f"data.source.path: {names} cannot be read as {kind}: {reason}. Set data.source.format if it is something else."
        ) from error


def _header(file: Path) -> list[str]:
    import fsspec

    with fsspec.open(str(file), "rt", compression="infer", encoding="utf-8-sig", newline="") as opened:
        return next(csv.reader(opened))


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent} either"
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.6)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _remote(url: str) -> list[Path]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        if system.protocol == "file" or "file" in system.protocol:
            return local_files(FilesSource(kind="files", path=path))
        names = sorted(system.glob(path)) if glob.has_magic(path) else [path]
        if not names:
            raise ConfigError(f"data.source.path = {url}: no file matches.")
        return [_copy(system, name) for name in names]
    except FileNotFoundError:
        raise ConfigError(f"data.source.path = {url}: there is no such file, or its server does not answer.") from None
    except ImportError as error:
        raise ConfigError(f"data.source.path = {url}: {error}.") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"data.source.path = {url} is no URL that fsspec knows ({error}).") from None
    except OSError as error:
        raise DataError(f"data.source.path = {url} cannot be read ({error or type(error).__name__}).") from error


def _copy(system: Any, name: str) -> Path:
    """The local copy of a remote file; a new one unless the remote side says that it is the same file."""
    info = system.info(name)
    if info.get("type") == "directory":
        raise ConfigError(f"data.source.path: {name} is a directory; name its files, e.g. {name.rstrip('/')}/*.jsonl.")
    mark = digest_json({str(key): str(value) for key, value in info.items()} | {"ukey": str(system.ukey(name))})
    copy = home() / "datasets" / "remote" / mark[:32] / Path(name).name
    if not copy.exists() or not _STAMPS & {str(key).lower() for key in info}:
        writable(copy.parent)
        partial = copy.with_name(f".{copy.name}.{os.getpid()}.tmp")
        try:
            system.get_file(name, str(partial))
            os.replace(partial, copy)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
    return copy
