"""The model registry in MLflow, writing: new versions, and moving the champion's alias; and all versions, to look at.

Callers that write hold `registry_lock`.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rl_core.artifacts import MANIFEST, Artifact
from rl_core.errors import ConfigError, StoreError
from rl_core.home import home, writable
from tasks.mlflow_registry import (
    CHAMPION,
    DIGEST,
    PREVIOUS,
    RegistryError,
    Version,
    champion_version,
    files_of,
    find_version,
    local_path,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.store.entities import PagedList

ROLLED_BACK = "ppoflow.rolled_back"
"""Tag of a version: it was the champion until somebody rolled back to the version named here."""


def register(
    client: "MlflowClient", name: str, policy: Artifact, *, tags: dict[str, str], experiment_id: str, run_id: str | None
) -> tuple[Version, bool]:
    """The version of `name` that holds this policy – the one that exists, its tags brought up to date, else a new one – and
    whether it is new.

    Args:
        policy: a model in Hugging Face form.
        tags: lineage, to be kept with the version.
        run_id: the MLflow run that trained it.
    """
    from mlflow.exceptions import MlflowException

    found = client.search_model_versions(f"name = '{name}' and tags.`{DIGEST}` = '{policy.digest}'")
    if found:
        version = min(map(Version.of, found), key=lambda version: int(version.number))
        for tag, value in tags.items():
            if version.tags.get(tag) != value:
                client.set_model_version_tag(name, version.number, tag, value)
        return version, False
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    model = _logged_model(client, name, policy, experiment_id, run_id)
    created = client.create_model_version(
        name, f"models:/{model.model_id}", run_id=run_id, tags={**tags, DIGEST: policy.digest}, model_id=model.model_id
    )
    return Version.of(created), True


def every_version(client: "MlflowClient") -> list[tuple[Version, list[str]]]:
    """All versions that ppoflow registered, of all models, and the aliases that point to each."""
    aliases: dict[tuple[str, str], list[str]] = {}
    for model in _all(client.search_registered_models):
        for alias, number in model.aliases.items():
            aliases.setdefault((model.name, str(number)), []).append(alias)
    versions = [Version.of(found) for found in _all(client.search_model_versions)]
    return [(version, sorted(aliases.get((version.name, version.number), []))) for version in versions if DIGEST in version.tags]


def _all(search: "Callable[..., PagedList[Any]]") -> Iterator[Any]:
    token = None
    while True:
        page = search(max_results=100, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


@contextmanager
def registered_files(client: "MlflowClient", version: Version) -> Iterator[Path]:
    """The files of a version as MLflow has them now, unverified: in place where they are on this machine, else downloaded for
    as long as the block runs, whatever copy there is."""
    from mlflow.artifacts import download_artifacts

    in_place = local_path(client.get_model_version_download_uri(version.name, version.number))
    if in_place is not None:
        yield in_place
        return
    with TemporaryDirectory(dir=writable(home() / "downloads"), prefix=".verify-") as directory:
        download_artifacts(artifact_uri=f"models:/{version.name}/{version.number}", dst_path=directory)
        yield Path(directory)


def make_champion(client: "MlflowClient", version: Version) -> None:
    """Verify a version's files in full, remember the champion that it replaces, move the alias, read it back.

    Raises:
        BrokenArtifact: its files are not those that were registered.
        RegistryError: somebody else moved the alias at the same time.
    """
    files_of(client, version, remembered=False)
    name, number = version.name, version.number
    current = champion_version(client, name)
    if current is not None and current.number == number:
        return
    if current is not None:
        client.set_model_version_tag(name, number, PREVIOUS, current.number)
    elif PREVIOUS in version.tags:
        client.delete_model_version_tag(name, number, PREVIOUS)
    _move_champion(client, name, number)
    if ROLLED_BACK in version.tags:
        client.delete_model_version_tag(name, number, ROLLED_BACK)


def restore_previous(client: "MlflowClient", name: str) -> Version:
    """Make the version that the champion replaced the champion again; returns it.

    Raises:
        ConfigError: there is no champion, or it replaced none.
        BrokenArtifact: its files are not those that were registered.
        RegistryError: somebody else moved the alias at the same time.
    """
    current = find_version(client, name, CHAMPION)
    if PREVIOUS not in current.tags:
        raise ConfigError(
            f"Version {current.number}, the champion of {name}, replaced no other version, so there is nothing to roll back to. "
            f"Choose a version yourself: `ppoflow promote {name} VERSION`."
        )
    previous = find_version(client, name, current.tags[PREVIOUS])
    files_of(client, previous, remembered=False)
    client.set_model_version_tag(name, current.number, ROLLED_BACK, previous.number)
    _move_champion(client, name, previous.number)
    return previous


def _move_champion(client: "MlflowClient", name: str, number: str) -> None:
    """Set the alias and read it back."""
    client.set_registered_model_alias(name, CHAMPION, number)
    now = champion_version(client, name)
    if now is None or now.number != number:
        raise RegistryError(
            f"The champion of {name} was moved to version {now and now.number} by somebody else at the same time; version "
            f"{number} is not the champion. Look at both in MLflow, then `ppoflow promote {name} {number}` if it should be."
        )


def _logged_model(client: "MlflowClient", name: str, policy: Artifact, experiment_id: str, run_id: str | None) -> "LoggedModel":
    """A finished LoggedModel with the policy's files; one that an interrupted registration left is completed."""
    from mlflow.entities import LoggedModelStatus

    found = client.search_logged_models([experiment_id], filter_string=f"tags.`{DIGEST}` = '{policy.digest}'")
    model = found[0] if found else client.create_logged_model(experiment_id, name, run_id, tags={DIGEST: policy.digest})
    if model.status == LoggedModelStatus.READY:
        return model
    target = local_path(model.artifact_location)
    if target is None:
        client.log_model_artifacts(model.model_id, str(policy.path))
    else:
        for file in [*policy.manifest["files"], MANIFEST]:
            _link(policy.path / file, target / file)
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def _link(source: Path, target: Path) -> None:
    """Hard-link, or copy where the file systems differ."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written ({error.strerror}). MLflow keeps the files of its models there: make it writable on "
            "this machine, or start the MLflow server with --serve-artifacts."
        ) from None
