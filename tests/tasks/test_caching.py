"""Stages as tasks of a real flow."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.caching import stage_task
from tasks.store import Key, Reference, Stage, produce

pytestmark = pytest.mark.usefixtures("prefect", "home")

made: list[str] = []


def _task(name: str):
    stage = Stage(name, 1, ())

    def body(key: Key, text: str, fresh: bool = False) -> Reference:
        def make(scratch: Path) -> dict[str, Any]:
            made.append(name)
            (scratch / "text").write_text(text)
            return {}

        return produce(key, make, fresh)

    return stage_task(body, stage), stage


def run(name: str, text: str, fresh: bool = False) -> Reference:
    """A flow of one stage."""
    from prefect import flow

    task, stage = _task(name)
    if fresh:
        task = task.with_options(refresh_cache=True)

    @flow(name="stages")
    def stages() -> Reference:
        return task(stage.key({"text": text}, {}), text, fresh=fresh)

    made.clear()
    return stages()


def test_hit_returns_the_artifact():
    first = run("hit", "a")
    assert (first.state, made) == ("computed", ["hit"])
    second = run("hit", "a")
    assert (second.state, second.digest, made) == ("reused", first.digest, [])


def test_equal_input_of_another_stage_is_no_hit():
    run("one", "a")
    other = run("other", "a")
    assert (other.stage, other.state, made) == ("other", "computed", ["other"])


def test_deleted_artifact_is_made_again():
    first = run("deleted", "a")
    shutil.rmtree(first.path)
    assert (run("deleted", "a").state, made) == ("computed", ["deleted"])


def test_flipped_byte_is_made_again(caplog):
    first = run("flipped", "a")
    (first.path / "text").write_text("b")
    assert (run("flipped", "a").state, made) == ("computed", ["flipped"])
    assert "set aside" in caplog.text
    assert (first.path / "text").read_text() == "a"


def test_artifact_without_a_record_is_adopted():
    """As when the flow is killed between commit and record."""
    task, stage = _task("adopted")
    task.fn(stage.key({"text": "a"}, {}), "a")
    assert (run("adopted", "a").state, made) == ("reused", [])


def test_fresh_is_made_again_and_then_reused():
    run("fresh", "a")
    assert (run("fresh", "a", fresh=True).state, made) == ("computed", ["fresh"])
    assert (run("fresh", "a").state, made) == ("reused", [])
