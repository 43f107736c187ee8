"""Every key of the schema by its dotted name: for suggestions in errors, and for tests that leave none out."""

import functools
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_core.config.base import Section
from rl_core.config.schema import Config


def leaves(model: type[BaseModel] = Config, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys that hold values, in the schema's order.

    Where a section comes in kinds, the kind stands in brackets (`data.source[hub].name`). What may be a section or a value (null
    too) is one of them, before its own (`actor.lora`, `actor.lora.rank`, …).
    """
    for name, field in model.model_fields.items():
        dotted, below = f"{above}{name}", sections(field.annotation)
        if not below or not all(map(sections, get_args(field.annotation))):
            yield dotted, field
        for section in below:
            kind = kind_of(section)
            yield from leaves(section, f"{dotted}[{kind}]." if kind and len(below) > 1 else f"{dotted}.")


def sections(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation allows: none for a value, several for one that comes in kinds."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def kind_of(section: type[BaseModel]) -> str | None:
    """The `kind` that selects a section, if it has one."""
    kind = section.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind is not None else None


@functools.cache
def value_keys() -> frozenset[str]:
    """Dotted names, without kinds, of the keys below which nothing can stand."""
    return frozenset(
        _plain(name) for name, field in leaves() if not sections(field.annotation) and get_origin(field.annotation) is not dict
    )


@functools.cache
def section_keys() -> frozenset[str]:
    """Dotted names, without kinds, of the sections that cannot be null."""
    above = {".".join(parts[:depth]) for parts in (key.split(".") for key in value_keys()) for depth in range(1, len(parts))}
    return frozenset(above - {name for name, field in leaves() if sections(field.annotation)})


def _plain(name: str) -> str:
    return ".".join(part.split("[")[0] for part in name.split("."))
