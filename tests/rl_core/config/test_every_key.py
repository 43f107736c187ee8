"""Every key of the schema has an effect that is seen in what the code does, not in the configuration that it prints.

A key that is in no table of every_key.py fails. So does, with its entry there, a key whose reading code is deleted.
"""

import ast
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import parse_config
from rl_core.config.effects import without_effect
from rl_core.config.keys import leaves
from rl_core.errors import ConfigError
from tests.rl_core.config.every_key import (
    ELSEWHERE,
    JUDGE,
    KEYS,
    OF_A_TRAINED_ROLE,
    OF_FSDP,
    OF_TRAINING,
    ONE_VALUE,
    SECTIONS,
    Shown,
)  # fmt: skip
from tests.rl_core.config.lab import Observation, configured, place, refused
from tests.rl_core.config.lab_models import layout, structure

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def _directory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(place() / "home"))
        yield
    shutil.rmtree(place())
    place.cache_clear()


def plain(name: str) -> str:
    """A key without the kinds of its sections."""
    return ".".join(part.split("[")[0] for part in name.split("."))


def said(config: Any) -> Observation:
    """What the user is told at the start."""
    return {"said": without_effect(config, 1, on_gpu=True)}


def cases() -> Iterator[tuple[str, Shown]]:
    """Every key that an observation shows, with the modes under whole names."""
    yield from KEYS.items()
    for role, section in {"fsdp": "fsdp", **SECTIONS}.items():
        mode = JUDGE if role == "reward" else {}
        fsdp, acting = ("fsdp", "actor") if role == "fsdp" else (f"{section}.fsdp", role)
        for name, shown in OF_FSDP.items():
            own = {f"{plain(fsdp)}.{key}": value for key, value in shown.mode.items()}
            observe = partial(shown.observe, role=acting)
            if acting in ("ref", "reward") and name in OF_TRAINING:
                yield f"{fsdp}.{name}", Shown(said, shown.changed, mode, at="said")
            else:
                yield f"{fsdp}.{name}", replace(shown, observe=observe, mode=mode | own)
        if role != "fsdp":
            yield f"{section}.torch_dtype", Shown(partial(structure, role=role), "bfloat16", mode, at="policies")
            yield f"model_mapping.{role}", Shown(partial(layout, role=role), [0, 1], mode, at="ranks")
    for role in ("actor", "critic"):
        for name, shown in OF_A_TRAINED_ROLE.items():
            own = {f"{role}.{key}": value for key, value in shown.mode.items()}
            yield f"{role}.{name}", replace(shown, observe=partial(shown.observe, role=role), mode=own)


CASES = dict(cases())
seen: dict[str, Observation] = {}


def observed(shown: Shown, overrides: dict[str, Any]) -> Observation:
    key = json.dumps([repr(shown.observe), overrides])
    if key not in seen:
        seen[key] = refused(shown.observe, configured(overrides))
    return seen[key]


def at(observation: Any, place: str) -> Any:
    for name in place.split(".") if place else []:
        observation = observation[int(name) if isinstance(observation, list) else name]
    return observation


@pytest.mark.parametrize("name", CASES)
def test_changing_a_key_changes_what_the_code_does(name: str) -> None:
    shown = CASES[name]
    changed = {plain(name).removesuffix(".kind"): shown.changed}
    before, after = observed(shown, shown.mode), observed(shown, shown.mode | changed)
    if shown.at:
        assert "refused" not in before, before
        assert "refused" not in after, after
    assert at(before, shown.at) != at(after, shown.at)


@pytest.mark.parametrize("name", sorted(ONE_VALUE))
def test_a_key_with_one_value_refuses_any_other(name: str) -> None:
    with pytest.raises(ConfigError, match=plain(name).replace(".", r"\.")):
        parse_config({"model": {"name_or_path": "m"}, "reward": {"kind": "model", "name_or_path": "r"}}, {plain(name): "other"})


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_show_the_other_keys_exist(test: str) -> None:
    path, _, name = test.partition("::")
    functions = [node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)]
    assert name in functions


def test_no_key_is_left_out() -> None:
    tables = [set(CASES), ONE_VALUE, set(ELSEWHERE)]
    keys = {name for name, _ in leaves()}
    assert set().union(*tables) == keys, "keys in no table, or tables with keys that do not exist"
    assert sum(map(len, tables)) == len(keys), "keys in two tables"
