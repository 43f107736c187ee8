"""The model registry in MLflow, reading: the champion, versions, and verified directories of their files.

A version never vouches for its content (MLflow takes an empty model for ready), so what it points to is compared with the
digest in its tag before anything uses it. MLflow's aliases have no compare-and-swap, so whoever changes something holds
`registry_lock` (one host or one shared file system).
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.artifacts import fresh_scratch, open_artifact, set_aside
from rl_core.errors import BrokenArtifact, ConfigError, PpoflowError
from rl_core.home import home
from rl_core.locks import locked
from tasks.mlflow_client import make_client

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

logger = logging.getLogger(__name__)

CHAMPION = "champion"
CANDIDATE = "candidate"
DIGEST = "ppoflow.digest"
"""Tag of a version: the digest of its files' manifest."""
PREVIOUS = "ppoflow.previous_champion"
"""Tag of a version: the one that it replaced as champion."""


class RegistryError(PpoflowError):
    """MLflow does not answer, or refuses; the same command goes on from there once it does."""


@dataclass(frozen=True)
class Champion:
    """The version that the alias `champion` points to, with a verified local directory of its files."""

    name: str
    version: str
    digest: str
    path: Path


@dataclass(frozen=True)
class Version:
    """A version of a registered model. MLflow's own entity has its number as an int or a text, by kind of store."""

    name: str
    number: str
    tags: dict[str, str]

    @classmethod
    def of(cls, entity: "ModelVersion") -> "Version":
        """From MLflow's entity."""
        return cls(entity.name, str(entity.version), dict(entity.tags))


@contextmanager
def registry(purpose: str) -> Iterator["MlflowClient"]:
    """MLflow's client.

    Args:
        purpose: completes "MLflow could not …" in the error.

    Raises:
        RegistryError: MLflow failed inside the block; retries are bounded by `tasks.environment`.
    """
    import mlflow
    import requests
    from mlflow.exceptions import MlflowException

    try:
        yield make_client()
    except (MlflowException, requests.RequestException) as error:
        reason = " ".join(str(error).split())[:300]
        text = (
            f"MLflow at {mlflow.get_tracking_uri()} could not {purpose}: {reason} Check that it runs and that "
            "MLFLOW_TRACKING_URI is right, then run the same command again: what is finished is reused."
        )
        raise RegistryError(re.sub(r"//[^/@\s]*@", "//", text)) from error  # no password of the address in a message


def registry_lock() -> AbstractContextManager[None]:
    """Held while versions are made or the champion changes."""
    return locked(home() / "registry.lock", on_wait=lambda holder: logger.info("The registry is being changed by %s", holder))


def champion(name: str, policy_digest: str | None = None) -> Champion | None:
    """The champion of a registered model; None where there is none yet.

    Args:
        policy_digest: of the policy to compare with it. Where that policy is the champion itself, this is the one that it
            replaced: a comparison made once stays the same one.

    Raises:
        RegistryError: MLflow does not answer.
        BrokenArtifact: its files are not those that were registered.
    """
    with registry(f"tell the champion of {name}") as client:
        version = champion_version(client, name)
        if version is not None and digest_of(version) == policy_digest:
            replaced = version.tags.get(PREVIOUS)
            version = _find_version(client, name, replaced)
        if version is None:
            return None
        return Champion(name, version.number, digest_of(version), files_of(client, version))


def champion_version(client: "MlflowClient", name: str) -> Version | None:
    """What the alias `champion` points to, files unseen."""
    return _find_version(client, name, _aliases(client, name).get(CHAMPION))


def resolve_model_uri(uri: str) -> Path:
    """The verified local directory of `models:/name@alias` or `models:/name/3`.

    Raises:
        ConfigError: not of that form, or no such model, alias or version.
        RegistryError: MLflow does not answer.
        BrokenArtifact: its files are not those that were registered.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", uri)
    if match is None:
        raise ConfigError(f"{uri} is no model of MLflow's registry. Write models:/name@champion or models:/name/3.")
    name, alias, number = match.groups()
    with registry(f"look up {uri}") as client:
        return files_of(client, find_version(client, name, number if alias is None else alias))


def find_version(client: "MlflowClient", name: str, which: str) -> Version:
    """The version of that number or alias; a ConfigError that says what there is, where there is none."""
    if _find_model(client, name) is None:
        known = ", ".join(sorted(other.name for other in client.search_registered_models())[:20]) or "none"
        raise ConfigError(
            f"MLflow has no registered model {name} (there are: {known}). A model is registered at the end of `ppoflow run`, "
            "under the name in registry.name."
        )
    aliases = _aliases(client, name)
    version = _find_version(client, name, which if which.isdigit() else aliases.get(which))
    if version is None:
        numbers = ", ".join(sorted((str(other.version) for other in client.search_model_versions(f"name = '{name}'")), key=int))
        known = ", ".join(f"{alias} → {number}" for alias, number in sorted(aliases.items()))
        raise ConfigError(
            f"The registered model {name} has no version or alias {which}. Choose one of its versions ({numbers or 'none'}) or "
            f"aliases ({known or 'none'})."
        )
    return version


def aliases_of(client: "MlflowClient", version: Version) -> list[str]:
    """The aliases that point to a version now."""
    return sorted(alias for alias, number in _aliases(client, version.name).items() if number == version.number)


def digest_of(version: Version) -> str:
    """The digest that a version's files must have.

    Raises:
        ConfigError: it was registered by something else than ppoflow.
    """
    if DIGEST not in version.tags:
        raise ConfigError(
            f"Version {version.number} of {version.name} was not registered by ppoflow (it has no tag {DIGEST}), so its files "
            "cannot be verified. Choose another version, or download it and give its directory."
        )
    return version.tags[DIGEST]


def files_of(client: "MlflowClient", version: Version, remembered: bool = True) -> Path:
    """A verified local directory of a version's files, to be read only: in place where MLflow keeps them on this machine,
    else downloaded once to `PPOFLOW_HOME/downloads`.

    Raises:
        BrokenArtifact: they are not those that were registered.
    """
    from mlflow.artifacts import download_artifacts

    digest = digest_of(version)
    in_place = local_path(client.get_model_version_download_uri(version.name, version.number))
    if in_place is not None:
        return _verified(in_place, version, remembered)
    directory = home() / "downloads" / "models" / digest
    with locked(directory.with_name(f".{digest}.lock")):
        if directory.exists():
            try:
                return _verified(directory, version, remembered)
            except BrokenArtifact as error:
                logger.warning("%s It is set aside as %s and downloaded again.", error, set_aside(directory).name)
        scratch = fresh_scratch(directory)
        download_artifacts(artifact_uri=f"models:/{version.name}/{version.number}", dst_path=str(scratch))
        _verified(scratch, version, remembered=False)
        os.rename(scratch, directory)
    return directory


def _find_version(client: "MlflowClient", name: str, number: str | None) -> Version | None:
    from mlflow.exceptions import MlflowException

    if number is None:
        return None
    try:
        return Version.of(client.get_model_version(name, number))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _aliases(client: "MlflowClient", name: str) -> dict[str, str]:
    model = _find_model(client, name)
    return {alias: str(number) for alias, number in model.aliases.items()} if model else {}


def _find_model(client: "MlflowClient", name: str) -> "RegisteredModel | None":
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def local_path(uri: str) -> Path | None:
    """The path of an artifact location on this machine; None for one that is reached over the network."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    return Path(local_file_uri_to_path(uri)) if is_local_uri(uri, is_tracking_or_registry_uri=False) else None


def _verified(directory: Path, version: Version, remembered: bool) -> Path:
    try:
        artifact = open_artifact(directory, remembered)
        if artifact.digest != version.tags[DIGEST]:
            raise BrokenArtifact(f"{directory}: its digest is {artifact.digest}, its tag says {version.tags[DIGEST]}.")
    except BrokenArtifact as error:
        raise BrokenArtifact(
            f"Version {version.number} of {version.name} is not what was registered. {error} Make another version the "
            f"champion (`ppoflow promote {version.name} VERSION`) or delete this one in MLflow."
        ) from None
    return directory
