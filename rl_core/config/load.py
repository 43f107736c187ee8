"""Reading a configuration: YAML, `key=value` overrides, and errors that name the key and the nearest right one."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rl_core.config.schema import Config
from rl_core.config.spellings import in_our_names, translated
from rl_core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-6` as a text; here it is a number, as everywhere else."""


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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of sections (model, data, reward, registry, …).")
    return parse_config(values, overrides, origin=str(path))


def parse_config(
    values: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = (), origin: str = "the configuration"
) -> Config:
    """Validate a mapping of sections after applying overrides and putting in environment variables.

    In any text, `${NAME}` and `${NAME:-default}` (names in capitals) stand for an environment variable. `origin` names the
    configuration in errors.

    Raises:
        ConfigError: unknown key, wrong value, a variable that is not set and has no default.
    """
    merged: dict[str, Any] = translated(values, origin)
    pairs = overrides.items() if isinstance(overrides, Mapping) else (_split_override(text) for text in overrides)
    for key, value in pairs:
        for name, meant in in_our_names(key, value, merged, origin).items():
            _put(merged, name, meant)
    try:
        return Config.model_validate(_with_environment(merged, origin, ()))
    except ValidationError as error:
        problems = "; ".join(_describe(item) for item in error.errors())
        raise ConfigError(f"{origin}: {problems}.") from None


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


def _put(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        if not isinstance(values.setdefault(name, {}), dict):
            raise ConfigError(f"--set {dotted}: {name} is a value, not a section.")
        values = values[name]
    values[last] = value


def _describe(item: Any) -> str:
    """One validation error in a clause, with the nearest known key for an unknown one."""
    where, siblings = _resolve(tuple(str(part) for part in item["loc"]))
    if item["type"] == "extra_forbidden":
        last = where[-1]
        close = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
        elsewhere = [key for key in _all_keys() if key.rsplit(".", 1)[-1] == last]
        if close:
            hint = f"did you mean {close[0]}?"
        elif elsewhere:
            hint = f"it belongs in {elsewhere[0]}"
        else:
            hint = f"known keys here: {', '.join(sorted(siblings))}"
        return f"unknown key {'.'.join(where)} ({hint})"
    name = ".".join(where) or "the whole"
    if item["type"] == "missing":
        return f"{name} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return message if item["type"] == "value_error" else f"{name} = {item['input']!r}: {message}"


def _resolve(location: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """A validation error's location as the user wrote it (pydantic puts the tag of a union in), and the keys known there."""
    where: list[str] = []
    known: list[str] = []
    candidates: list[type[BaseModel]] = [Config]
    for part in location:
        if len(candidates) > 1 and (tagged := [model for model in candidates if _tag(model) == part]):
            candidates = tagged
            continue
        known = [key for model in candidates for key in model.model_fields]
        where.append(part)
        candidates = [
            found for model in candidates if part in model.model_fields for found in _models(model.model_fields[part].annotation)
        ]
    return where, known


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


def _tag(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind is not None else None


def _all_keys() -> list[str]:
    sections = ((name, model) for name, field in Config.model_fields.items() for model in _models(field.annotation))
    return [f"{name}.{key}" for name, model in sections for key in model.model_fields]
