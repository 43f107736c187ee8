"""Prefect's side of the cache: a stage's task is cached under the store's key, and a hit must verify.

The key is computed before the task is called and is its first parameter: a key function that raises inside Prefect would
silently turn caching off. Prefect's record holds only the small `Reference`; the serializer opens the artifact whenever a
record is read, so that a record whose artifact is gone or damaged counts as absent and the stage runs again. One writer
per key is the store's business (`tasks.store.produce`), hence no isolation level here.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

from prefect import Task, task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.serializers import Serializer

from tasks.store import Key, Reference, Stage


class StoreKeyPolicy(CachePolicy):
    """The cache key of a stage's task is the key that it was given."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        """`<stage>-<sha256>`."""
        key: Key = inputs["key"]
        return f"{key.stage}-{key.value}"


class ReferenceSerializer(Serializer):
    """JSON of a `Reference`; reading one verifies the artifact that it points to."""

    type: Literal["ppoflow-reference"] = "ppoflow-reference"

    def dumps(self, obj: Reference | Exception) -> bytes:
        """The record. Prefect also keeps the error of a failed task, which nobody reads back."""
        return json.dumps(obj.to_json() if isinstance(obj, Reference) else {"error": repr(obj)}).encode()

    def loads(self, blob: bytes) -> Reference:
        """The reference, marked `reused`.

        Raises:
            BrokenArtifact: Prefect then runs the task.
        """
        reference = Reference(**{**json.loads(blob), "state": "reused", "resumed_from_step": None})
        reference.open()
        return reference


def stage_task(function: Callable[..., Reference], stage: Stage) -> Task[..., Reference]:
    """A Prefect task of the stage's name from `function(key, …) -> Reference`, cached under its key."""
    decorate = task(
        name=stage.name,
        cache_policy=StoreKeyPolicy(),
        result_serializer=ReferenceSerializer(),
        persist_result=True,
    )
    return decorate(function)
