"""A committed directory: written aside, hashed, synced, renamed. What has no manifest does not exist.

    scratch = fresh_scratch(final)       # a sibling of `final`; leavings of a dead writer are removed
    …write files under scratch…
    artifact = commit(scratch, final, kind="dataset", key=key)
    artifact = open_artifact(final)      # verified; raises BrokenArtifact

The caller makes sure that there is one writer (`rl_core.locks`). Checkpoints, datasets, converted weights, policies and
evaluations are all committed in this way.
"""

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.digests import digest_files, digest_json
from rl_core.errors import BrokenArtifact, StoreError

MANIFEST = "manifest.json"
FORMAT = 1


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
        raise StoreError(
            f"{scratch.parent} cannot be written ({error.strerror}). Set PPOFLOW_HOME to a directory that you own."
        ) from None
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
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
        _sync(scratch / MANIFEST)
        for directory in {path.parent for path in files} | {scratch}:
            _sync(directory)
        if final.exists():
            raise StoreError(f"{final} exists already; set it aside first.")
        os.rename(scratch, final)
        _sync(final.parent)
    except OSError as error:
        raise StoreError(f"{final} could not be committed: {error}.") from error
    return Artifact(final, manifest)


def open_artifact(path: Path, remembered: bool = True) -> Artifact:
    """Read and verify a committed directory.

    Args:
        remembered: trust the digests of files that were not touched since they were hashed.

    Raises:
        BrokenArtifact: no manifest, a damaged one, or a file that is missing, superfluous or changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        stated = manifest.pop("checksum")
        entries, notes = manifest["files"], manifest["notes"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BrokenArtifact(f"{path}: its {MANIFEST} is missing or damaged ({error}).") from None
    if digest_json(manifest) != stated or manifest["digest"] != _content_digest(entries, notes):
        raise BrokenArtifact(f"{path}: its {MANIFEST} was changed.")
    if manifest["format"] != FORMAT:
        raise BrokenArtifact(f"{path}: format {manifest['format']} is not the format {FORMAT} of this release.")
    present = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()} - {MANIFEST}
    for name in sorted(present ^ set(entries)):
        raise BrokenArtifact(f"{path}: {name} is {'superfluous' if name in present else 'missing'}.")
    try:
        for name, entry in entries.items():
            if (path / name).stat().st_size != entry["size"]:
                raise BrokenArtifact(f"{path}: {name} has {(path / name).stat().st_size} bytes instead of {entry['size']}.")
        digests = digest_files([path / name for name in entries], remembered)
    except OSError as error:
        raise BrokenArtifact(f"{path}: {error}.") from None
    for name, entry in entries.items():
        if digests[path / name] != entry["sha256"]:
            raise BrokenArtifact(f"{path}: the content of {name} was changed (its sha256 differs).")
    manifest["checksum"] = stated
    return Artifact(path, manifest)


def _content_digest(entries: dict[str, Any], notes: Collection[str]) -> str:
    return digest_json({name: entry for name, entry in entries.items() if name not in notes})


def set_aside(path: Path) -> Path:
    """Rename a broken directory so that nobody takes it for whole; returns its new name."""
    number = 0
    while (aside := path.with_name(f".{path.name}.broken-{number}")).exists():
        number += 1
    os.rename(path, aside)
    return aside


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
