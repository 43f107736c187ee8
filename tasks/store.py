"""The store: what decides a stage's output (`Key`), where the output is (`Reference`), and making it exactly once.

    STAGE = Stage("tokenize_dataset", version=1, sources=("rl_core/data",), libraries=("transformers",))
    key = STAGE.key(config={…}, inputs={…})
    reference = produce(key, make)          # make(scratch) writes the files and returns small results

`PPOFLOW_HOME/store/<stage>/<key>/` holds committed directories only (`rl_core.artifacts`).
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rl_core.artifacts import (
    MANIFEST,
    Artifact,
    commit,
    fresh_scratch,
    open_artifact,
    refusal,
    remedy,
    scratch_of,
    set_aside,
)
from rl_core.digests import digest_json, flatten
from rl_core.errors import BrokenArtifact, StoreError
from rl_core.home import home, writable
from rl_core.locks import locked
from tasks.store_use import use

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
State = Literal["computed", "resumed", "reused"]


@dataclass(frozen=True)
class Key:
    """The identity of a stage's output: `value` is the sha256 of `components`, a flat mapping of dotted names."""

    stage: str
    value: str
    components: dict[str, Any]
    replacing: bool = False
    """Whether what is stored or remembered under it is to be made again."""

    @property
    def path(self) -> Path:
        """Where the output is committed."""
        return home() / "store" / self.stage / self.value


@dataclass(frozen=True)
class Stage:
    """What makes one kind of artifact."""

    name: str
    version: int
    """Raised when the meaning of the output changes although no source below does."""
    sources: tuple[str, ...]
    """Files and packages (relative to the project) whose text decides the output."""
    libraries: tuple[str, ...] = ()
    """Distributions whose version matters to the output."""

    def key(self, config: dict[str, Any], inputs: dict[str, Any]) -> Key:
        """The key of this stage for the part of the config that it reads and for the digests of its inputs."""
        components = {
            "stage": self.name,
            "version": self.version,
            "code": self.code_digest(),
            **flatten(config, "config"),
            **flatten(inputs, "input"),
            **flatten(library_versions(self.libraries), "library"),
        }
        return Key(self.name, digest_json(components), components)

    def code_digest(self) -> str:
        """sha256 over the sources' text."""
        digest = hashlib.sha256()
        for source in self.sources:
            path = ROOT / source
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            for file in files:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class Reference:
    """A small pointer to an artifact: what tasks return and Prefect stores. The path is derived, so the store can move."""

    stage: str
    key: str
    digest: str
    state: State = "computed"
    """How this process came to it."""
    resumed_from_step: int | None = None
    """Of a training that went on from a checkpoint."""

    @property
    def path(self) -> Path:
        """Where the artifact is."""
        return home() / "store" / self.stage / self.key

    def open(self) -> Artifact:
        """The verified artifact.

        Raises:
            BrokenArtifact: it is gone, damaged, or another than the one referred to.
        """
        use(self.path)
        artifact = open_artifact(self.path)
        if artifact.digest != self.digest:
            raise BrokenArtifact(f"{self.path}: its digest is {artifact.digest}, expected {self.digest}.")
        return artifact

    def to_json(self) -> dict[str, Any]:
        """For Prefect's record."""
        return asdict(self)


def reference_of(artifact: Artifact, state: State, resumed_from_step: int | None = None) -> Reference:
    """The reference to a committed artifact of the store."""
    return Reference(artifact.manifest["kind"], artifact.key, artifact.digest, state, resumed_from_step)


def produce(
    key: Key,
    make: Callable[[Path], dict[str, Any]],
    fresh: bool = False,
    keep_scratch: bool = False,
    notes: Collection[str] = (),
) -> Reference:
    """The artifact of `key`: the committed one, else made by `make(scratch)` and committed. One process at a time.

    A broken artifact is set aside with a warning and made again.

    Args:
        key: what to produce.
        make: writes files under the scratch directory, returns small JSON results for the manifest.
        fresh: make it again although it exists.
        keep_scratch: hand `make` what an interrupted one left there, instead of an empty directory.
        notes: files that are no part of the digest, see `rl_core.artifacts.commit`.

    Raises:
        StoreError: the disk is full, or cannot be written.
    """
    writable(key.path.parent)
    use(key.path)
    with locked(
        lock_path(key), on_wait=lambda holder: logger.info("%s: waiting for %s, which makes the same", key.stage, holder)
    ):
        existing = None if fresh else find(key)
        if existing is not None:
            return reference_of(existing, "reused")
        if keep_scratch and not fresh:
            scratch = scratch_of(key.path)
            scratch.mkdir(parents=True, exist_ok=True)
        else:
            scratch = fresh_scratch(key.path)
        try:
            results = make(scratch)
        except Exception as error:
            refused = refusal(error) or _full(scratch, error)
            if refused is None or remedy(refused) in str(error):
                raise
            if not keep_scratch:
                shutil.rmtree(scratch, ignore_errors=True)
            said = f"{refused.strerror}: {error}" if isinstance(error, StoreError) else f"{scratch.parent}: {refused.strerror}."
            raise StoreError(f"{key.stage}: {said} {remedy(refused)}") from error
        replaced = set_aside(key.path) if key.path.exists() else None
        artifact = commit(
            scratch, key.path, kind=key.stage, key=key.value, components=key.components, results=results, notes=notes
        )
        if replaced is not None:
            shutil.rmtree(replaced)
        return reference_of(artifact, "computed")


def _full(scratch: Path, error: Exception) -> OSError | None:
    """The reason that a library has lost (torch's writer of zip files does)."""
    if isinstance(error, (OSError, RuntimeError, StoreError)) and shutil.disk_usage(scratch.parent).free < 2**20:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def find(key: Key) -> Artifact | None:
    """The committed, verified artifact of a key; a broken one is set aside with a warning."""
    use(key.path)
    if not key.path.exists():
        return None
    try:
        artifact = open_artifact(key.path)
        if artifact.key != key.value:
            raise BrokenArtifact(f"{key.path}: it is {artifact.key} under another's name.")
        return artifact
    except BrokenArtifact as error:
        logger.warning("%s The artifact is set aside as %s and its stage runs again.", error, set_aside(key.path).name)
        return None


def lock_path(key: Key) -> Path:
    """The lock that the one writer of a key holds."""
    return key.path.parent / f".{key.value}.lock"


def manifests(stage: str) -> Iterator[dict[str, Any]]:
    """The manifests of all committed artifacts of a stage, newest first; unreadable ones are passed over."""
    found = []
    for path in (home() / "store" / stage).glob(f"[!.]*/{MANIFEST}"):
        try:
            found.append((path.stat().st_mtime_ns, json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError):  # damaged, or taken away by another process just now
            continue
    for _, manifest in sorted(found, key=lambda pair: pair[0], reverse=True):
        if isinstance(manifest, dict) and isinstance(manifest.get("components"), dict):
            yield manifest


def differences(key: Key) -> list[str]:
    """Names of the components in which a key differs from the most similar artifact of its stage; [] if there is none."""
    others = (manifest["components"] for manifest in manifests(key.stage))
    return min((_differing(other, key.components) for other in others), key=len, default=[])


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def library_versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions of distributions (null where missing)."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
