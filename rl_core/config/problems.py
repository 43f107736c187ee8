"""What is wrong with a configuration, in one paragraph that names each key as the user wrote it, and the nearest right one."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rl_core.config.keys import kind_of, sections, value_keys
from rl_core.config.schema import Config
from rl_core.config.spellings import other_names

MOST_UNKNOWN = 5


def describe(error: ValidationError, written: Mapping[str, str]) -> str:
    """All problems of a validation; `written` holds the other names under which keys of ours were given."""
    problems = [problem for item in error.errors() for problem in _problems(item, written)]
    return "; ".join(dict.fromkeys(problems))


def _problems(item: Any, written: Mapping[str, str]) -> Iterator[str]:
    where, known = _resolve(tuple(str(part) for part in item["loc"]))
    name = ".".join(where)
    said = f"{name} (given as {written[name]})" if name in written else name
    if item["type"] == "extra_forbidden":
        keys = list(_below(name, item["input"]))
        for key in keys[:MOST_UNKNOWN]:
            yield f"unknown key {written.get(key, key)} ({_hint(key, known)})"
        if len(keys) > MOST_UNKNOWN:
            yield f"{len(keys) - MOST_UNKNOWN} more unknown keys in {where[0]}"
    elif item["type"] == "missing":
        yield f"{name} is missing"
    elif item["type"] in ("union_tag_not_found", "union_tag_invalid"):
        tag = item["ctx"].get("tag")
        given = "is missing" if tag is None else f"= {tag!r}"
        yield f"{name}.kind {given}: it must be one of {', '.join(_kinds(where))}"
    elif item["type"] == "value_error":
        yield item["msg"].removeprefix("Value error, ")
    else:
        yield f"{said or 'the whole'} = {item['input']!r}: {item['msg']}"


def _below(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _below(f"{name}.{key}", item)
    else:
        yield name


def _hint(key: str, siblings: list[str]) -> str:
    """What the user may have meant by an unknown key: a name near to it, or the place where it belongs."""
    section, _, last = key.rpartition(".")
    beside = {name.rsplit(".", 1)[-1] for name in other_names() if name.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(last, [*siblings, *beside], n=1, cutoff=0.6):
        return f"did you mean {close[0]}?"
    elsewhere = [name for name in value_keys() if name.rsplit(".", 1)[-1] == last]
    shallow = [name for name in elsewhere if name.count(".") == min(other.count(".") for other in elsewhere)]
    if 0 < len(shallow) < 3:  # a name that stands in many sections says nothing
        return f"it belongs in {min(shallow, key=_order)}"
    return f"known keys here: {', '.join(sorted({*siblings, *beside}))}"


def _resolve(location: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """A validation error's location as the user wrote it (pydantic puts the kind of a section in), and the keys known there."""
    where: list[str] = []
    known: list[str] = []
    candidates: list[type[BaseModel]] = [Config]
    for part in location:
        if len(candidates) > 1 and (tagged := [section for section in candidates if kind_of(section) == part]):
            candidates = list(tagged)
            continue
        if where and not candidates:
            break  # inside a value: what pydantic adds is no key
        known = [key for section in candidates for key in section.model_fields]
        where.append(part)
        fields = [section.model_fields[part] for section in candidates if part in section.model_fields]
        candidates = [section for field in fields for section in sections(field.annotation)]
    return where, known


def _kinds(where: list[str]) -> list[str]:
    candidates: list[type[BaseModel]] = [Config]
    for part in where:
        candidates = [section for model in candidates for section in sections(model.model_fields[part].annotation)]
    return [kind for section in candidates if (kind := kind_of(section))]


def _order(key: str) -> int:
    return list(Config.model_fields).index(key.split(".", 1)[0])
