"""A committed directory: written aside, hashed, synced, renamed. What has no manifest does not exist.

    scratch = fresh_scratch(final)       # a sibling of `final`; leavings of a dead writer are removed
    …write files under scratch…
    artifact = commit(scratch, final, kind="dataset", key=key)
    artifact = open_artifact(final)      # verified; raises BrokenArtifact

The caller makes sure that there is one writer (`rl_core.locks`). Checkpoints, datasets, converted weights, policies and
evaluations are all committed in this way.
"""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.digests import digest_file, digest_files, digest_json, moved
from rl_core.errors import BrokenArtifact, StoreError

MANIFEST = "manifest.json"
FORMAT = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Artifact:
    """A committed, immutable directory and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def key(self) -> str:
        """What it was made from, as the stage's key."""
        return self.manifest["key"]

    @property
    def digest(self) -> str:
        """sha256 over names, sizes and contents of its files, notes left out: equal content, equal digest."""
        return self.manifest["digest"]

    @property
    def results(self) -> dict[str, Any]:
        """Small results that the writer stored with it."""
        return self.manifest["results"]


def fresh_scratch(final: Path) -> Path:
    """An empty sibling of `final` to write into."""
    scratch = scratch_of(final)
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"{scratch.parent} cannot be written ({error.strerror}). {remedy(error)}") from None
    return scratch


def scratch_of(final: Path) -> Path:
    """Where the directory that will become `final` is written; it may hold what an earlier writer left."""
    return final.with_name(f".{final.name}.partial")


def commit(
    scratch: Path,
    final: Path,
    *,
    kind: str,
    key: str,
    components: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    notes: Collection[str] = (),
) -> Artifact:
    """Hash and sync all files of `scratch`, write the manifest last, rename to `final`.

    Args:
        kind: what it is (the stage's name, or `checkpoint`).
        key: what it was made from.
        components: the parts of the key, kept to explain it.
        results: small JSON results to keep with it.
        notes: names of files that tell how it came about (logs, timings): verified like the others, but no part of the digest.

    Raises:
        StoreError: `final` exists already, or the disk refuses.
    """
    try:
        files = sorted(path for path in scratch.rglob("*") if path.is_file() and path != scratch / MANIFEST)
        for path in files:
            _sync(path)
        digests = digest_files(files)
        entries = {str(path.relative_to(scratch)): {"size": path.stat().st_size, "sha256": digests[path]} for path in files}
        manifest = {
            "format": FORMAT, "kind": kind, "key": key, "digest": _content_digest(entries, notes), "notes": sorted(notes),
            "files": entries, "components": components or {}, "results": results or {},
        }  # fmt: skip
        manifest["checksum"] = digest_json(manifest)
        (scratch / MANIFEST).write_text(_text(manifest), encoding="utf-8")
        _sync(scratch / MANIFEST)
        for directory in {scratch / parent for path in files for parent in path.relative_to(scratch).parents} | {scratch}:
            _sync(directory)
        if final.exists():
            raise StoreError(f"{final} exists already; set it aside first.")
        os.rename(scratch, final)
        _sync(final.parent)
        moved(scratch, final)
    except OSError as error:
        raise StoreError(f"{final} could not be committed: {error}. {remedy(error)}") from error
    return Artifact(final, manifest)


def open_artifact(path: Path, remembered: bool = True) -> Artifact:
    """Read and verify a committed directory.

    Args:
        remembered: trust the digests of files that were not touched since they were hashed.

    Raises:
        BrokenArtifact: no manifest, a damaged one, or a file that is missing, superfluous or changed.
    """
    manifest = read_manifest(path)
    for problem in _problems(path, manifest["files"], remembered):
        raise BrokenArtifact(f"{path}: {problem}.")
    return Artifact(path, manifest)


def damage(path: Path) -> list[str]:
    """Everything about a committed directory that is not as it was written, every byte read again; [] if it is whole."""
    try:
        manifest = read_manifest(path)
    except BrokenArtifact as error:
        return [str(error).removeprefix(f"{path}: ").removesuffix(".")]
    return list(_problems(path, manifest["files"], remembered=False))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed directory, whose files are not looked at.

    Raises:
        BrokenArtifact: there is none, or it is not what `commit` wrote, to the byte.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        said = {name: value for name, value in manifest.items() if name != "checksum"}
        whole = manifest["checksum"] == digest_json(said) and text == _text(manifest)
        whole = whole and manifest["digest"] == _content_digest(manifest["files"], manifest["notes"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BrokenArtifact(f"{path}: its {MANIFEST} is missing or damaged ({error}).") from None
    if not whole:
        raise BrokenArtifact(f"{path}: its {MANIFEST} was changed.")
    if manifest["format"] != FORMAT:
        raise BrokenArtifact(f"{path}: format {manifest['format']} is not the format {FORMAT} of this release.")
    return manifest


def _problems(path: Path, entries: dict[str, Any], remembered: bool) -> Iterator[str]:
    """What is wrong with the files, one sentence each."""
    present = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
    for name in sorted(present ^ set(entries)):
        yield f"{name} is {'superfluous' if name in present else 'missing'}"
    as_long = []
    for name in sorted(present & set(entries)):
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"
            continue
        if size != entries[name]["size"]:
            yield f"{name} has {size} bytes instead of {entries[name]['size']}"
        elif not (path / name).is_file():
            yield f"{name} is no file"
        else:
            as_long.append(name)
    yield from _changed(path, entries, as_long, remembered)


def _changed(path: Path, entries: dict[str, Any], names: list[str], remembered: bool) -> Iterator[str]:
    try:
        digests = digest_files([path / name for name in names], remembered)
        for name in names:
            # Where the memory says so the file is asked itself: a damaged memory condemns nothing.
            if digests[path / name] != entries[name]["sha256"] != digest_file(path / name, remembered=False):
                yield f"the content of {name} was changed (its sha256 differs)"
    except OSError as error:
        if len(names) == 1:
            yield f"{names[0]} cannot be read ({error.strerror})"
        else:  # which?
            for name in names:
                yield from _changed(path, entries, [name], remembered)


def _content_digest(entries: dict[str, Any], notes: Collection[str]) -> str:
    return digest_json({name: entry for name, entry in entries.items() if name not in notes})


def _text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=1, sort_keys=True)


def set_aside(path: Path) -> Path:
    """Rename a broken directory so that nobody takes it for whole; returns its new name."""
    number = 0
    while (aside := path.with_name(f".{path.name}.broken-{number}")).exists():
        number += 1
    try:
        os.rename(path, aside)
    except OSError as error:
        raise StoreError(f"{path} is broken and cannot be set aside ({error.strerror}). {remedy(error)}") from error
    return aside


def refusal(error: BaseException | None) -> OSError | None:
    """The error of a full or read-only disk that lies behind another, whatever library reports it; None if there is none."""
    while error is not None:
        said = str(error)
        for number in (*NO_ROOM, errno.EROFS):
            if getattr(error, "errno", None) == number or f"os error {number})" in said or os.strerror(number) in said:
                return OSError(number, os.strerror(number))  # "os error" says Rust
        if "Not enough disk space" in said:  # `datasets`
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = error.__cause__ or error.__context__
    return None


def remedy(error: OSError) -> str:
    """What to do when the disk refuses."""
    if error.errno in NO_ROOM:
        return "Make room (`ppoflow store gc` removes what nothing needs), then run the same command again."
    if error.errno == errno.EROFS:
        return "Make its file system writable, or set PPOFLOW_HOME to a directory elsewhere; then run the same command again."
    return "Set PPOFLOW_HOME to a directory that you own."


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
