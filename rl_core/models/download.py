"""Files of fsspec URLs, brought to PPOFLOW_HOME once and found there afterwards."""

import hashlib
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from rl_core.errors import ModelError
from rl_core.home import home, writable
from rl_core.locks import locked


def fetch(url: str, patterns: tuple[str, ...], section: str = "model") -> Path:
    """The local copy of a file, or of those files of a directory that match; what is local already is used where it is.

    The copy's directory is named after the URL and what the file system says of the content (an entity tag, a zip's
    checksums, times and sizes), so a changed original is fetched anew. It is written aside and renamed.

    Args:
        url: of any fsspec file system, chained ones included (`zip://inner::file://outer`). A leading `simplecache::`
            says what is done anyway; `file://` paths may be relative to the working directory.
        patterns: of the files that are wanted of a directory.
        section: of the configuration, for messages.

    Raises:
        ModelError: there is nothing at the URL, or it cannot be reached.
    """
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    plain = url.removeprefix("simplecache::")
    try:
        files_of, path = url_to_fs(plain)
        if isinstance(files_of, LocalFileSystem):
            files_of.info(path)
            return Path(path)
        names = [path] if files_of.isfile(path) else _matching(files_of.find(path), path, patterns)
        if not names:
            raise ModelError(f"{section}.name_or_path: there is nothing at {url}.")
        stamps = [str(files_of.info(name)) for name in names]  # an archive's `ukey` differs each time
        folder = home() / "downloads" / hashlib.sha256("\n".join([plain, *stamps]).encode()).hexdigest()[:16]
        copy = folder / path.rstrip("/").rpartition("/")[2]
        if copy.exists():
            return copy
        writable(folder.parent)
        with locked(folder.with_suffix(".lock")):
            if not copy.exists():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                for name in names:
                    target = partial / copy.name / name[len(path) :].lstrip("/") if name != path else partial / copy.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    files_of.get_file(name, str(target))
                os.rename(partial, folder)
        return copy
    except ImportError as error:
        raise ModelError(f"{section}.name_or_path: {url} needs a package that is not installed ({error}).") from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{section}.name_or_path: {url} cannot be read ({type(error).__name__}: {error}).") from error


def _matching(found: list[str], root: str, patterns: tuple[str, ...]) -> list[str]:
    relative = {name: name[len(root) :].lstrip("/") for name in found}
    return sorted(name for name, inner in relative.items() if any(fnmatch(inner, pattern) for pattern in patterns))
