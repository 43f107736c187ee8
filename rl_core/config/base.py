"""What all sections share: strictness, docs under the fields, and which fields decide a result.

A field is part of a stage's identity unless it is marked `Runtime`: a runtime field changes how fast or where something
runs, how often it is saved or how long it goes on, never what comes out of the same step.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")


class _RuntimeMark:
    """Marks a field that is left out of `identity()`."""


RUNTIME = _RuntimeMark()
Runtime = Annotated[T, RUNTIME]


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys are errors, the doc of a field stands under it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def identity(self) -> dict[str, Any]:
        """The fields that decide an outcome, as JSON values (nested sections likewise)."""
        chosen = {}
        for name, field in type(self).model_fields.items():
            if any(mark is RUNTIME for mark in field.metadata):
                continue
            value = getattr(self, name)
            chosen[name] = value.identity() if isinstance(value, Section) else self.model_dump(mode="json", include={name})[name]
        return chosen
