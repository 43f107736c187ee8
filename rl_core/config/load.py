"""Reading a configuration: YAML, `key=value` overrides, and errors that name the key and the nearest right one."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rl_core.config.layers import FILE, OVERRIDES, Settings
from rl_core.config.problems import describe
from rl_core.config.schema import Config
from rl_core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-6` as a text; here it is a number, as everywhere else. A key given twice is an error, not the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::-([^}]*))?\}")


def load_config(path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Config:
    """Read a YAML file, apply overrides (`"trainer.max_steps=4"`, or a mapping of dotted keys), validate.

    Raises:
        ConfigError: no such file, no YAML mapping, unknown key, wrong value.
    """
    path = Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration file {path}. Pass the path of a YAML file, like those in configs/."
        ) from None
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of sections (model, data, reward, registry, …).")
    try:
        return parse_config(values, overrides, origin=str(path))
    except RecursionError:
        raise ConfigError(f"{path}: an anchor (&name) contains itself (*name).") from None


def parse_config(
    values: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = (), origin: str = "the configuration"
) -> Config:
    """Validate a mapping of sections after putting overrides on top and environment variables in.

    In any text, `${NAME}` and `${NAME:-default}` (names in capitals) stand for an environment variable. Keys may have other
    names (rl_core.config.spellings). An override wins over the file under whatever name; one of a section changes the keys that
    it gives, unless it is of another kind. `origin` names the configuration in errors.

    Raises:
        ConfigError: unknown key, wrong value, a key given twice with different values, a variable that is not set and has no
            default.
    """
    given = overrides if isinstance(overrides, Mapping) else dict(_split_override(text) for text in overrides)
    settings = Settings()
    settings.add(_with_environment(values, origin, ()), FILE, f"{origin}:")
    settings.add(_with_environment(given, origin, ()), OVERRIDES, "--set")
    settings.translate()
    try:
        return Config.model_validate(settings.nested())
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(error, settings.written())}.") from None


def _with_environment(value: Any, origin: str, where: tuple[Any, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_environment(item, origin, (*where, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_environment(item, origin, where) for item in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        name, default = match.groups()
        text = os.environ.get(name) or default
        if text is None:
            key = ".".join(map(str, where))
            raise ConfigError(
                f"{origin}: {key}: the environment variable {name} is not set; set it or write ${{{name}:-default}}."
            )
        return text

    return _VARIABLE.sub(variable, value)


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set takes key=value, e.g. trainer.max_steps=4; got {text!r}.")
    try:
        return key, yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value is not valid YAML: {' '.join(str(error).split())}.") from None
