"""What a flow is given, settled: a whole configuration, and the base model as local files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config, load_config, parse_config

if TYPE_CHECKING:
    from rl_core.models.source import ModelSource


def settle(config: Config | Path | str, overrides: dict[str, Any] | None = None) -> Config:
    """The configuration in force: a file's or the one given, with `overrides` (dotted keys) applied.

    Raises:
        ConfigError: no such file, unknown key, wrong value.
    """
    if not isinstance(config, Config):
        return load_config(config, overrides or {})
    return parse_config(config.model_dump(mode="json"), overrides) if overrides else config


def model_source(config: Config) -> "ModelSource":
    """The base model's files; one from MLflow's registry is verified first.

    Raises:
        ModelError, ConfigError: there is no such model.
    """
    from rl_core.models.source import no_revision, resolve

    model = config.model
    if model.name_or_path.startswith("models:/"):
        from tasks.mlflow_registry import resolve_model_uri

        if model.revision is not None:
            raise no_revision(model.name_or_path)
        model = model.model_copy(update={"name_or_path": str(resolve_model_uri(model.name_or_path))})
    return resolve(model)
