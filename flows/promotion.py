"""Which registered policy is the champion, changed by hand: `ppoflow promote NAME VERSION`, `ppoflow rollback NAME`.

`promote` and `rollback` are plain functions; `promote_policy` and `rollback_policy` are the same as Prefect flows.
"""

from tasks.environment import prepare

prepare()

from prefect import flow  # noqa: E402 – reads the environment at import

from tasks.mlflow_registry import find_version, registry, registry_lock  # noqa: E402
from tasks.mlflow_versions import make_champion, restore_previous  # noqa: E402


def promote(name: str, version: str | int) -> str:
    """Make a version of a registered model its champion, after all its files were verified; returns what to tell the user.

    Raises:
        ConfigError: no such model or version.
        BrokenArtifact: its files are not those that were registered.
        RegistryError: MLflow does not answer.
    """
    with registry_lock(), registry(f"promote version {version} of {name}") as client:
        chosen = find_version(client, name, str(version))
        make_champion(client, chosen)
    return f"The champion of {name} is version {chosen.number}. To undo: ppoflow rollback {name}"


def rollback(name: str) -> str:
    """Make the version that the champion of a registered model replaced the champion again; returns what to tell.

    Raises:
        ConfigError: no such model, no champion, or it replaced none.
        BrokenArtifact: the files of the earlier one are not those that were registered.
        RegistryError: MLflow does not answer.
    """
    with registry_lock(), registry(f"roll back the champion of {name}") as client:
        previous = restore_previous(client, name)
    return f"The champion of {name} is version {previous.number} again."


promote_policy = flow(name="promote-policy")(promote)
rollback_policy = flow(name="rollback-policy")(rollback)
