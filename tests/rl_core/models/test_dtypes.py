"""The type that a role computes in, on a GPU with bfloat16, on one without, and on a CPU."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_core.config import parse_config
from rl_core.config.schema import Config, Role
from rl_core.models import dtypes
from rl_core.models.dtypes import usable_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROLES: tuple[Role, ...] = ("actor", "critic", "ref", "reward")
CAST = {"ref_model.disable_half_cast": True}


def config(dtype: str, **overrides: Any) -> Config:
    """With all four roles; the reward model stands apart from `model`, but shares its type."""
    model = {"name_or_path": "unused", "torch_dtype": dtype}
    return parse_config({"model": model, "reward": {"kind": "model", "name_or_path": "unused"}}, overrides)


def of_roles(config: Config, device: torch.device) -> list[torch.dtype]:
    return [usable_dtype(config, role, device) for role in ROLES]


@pytest.fixture(autouse=True)
def unsaid() -> Iterator[None]:
    """Nothing has been said yet, nor will it count as said for other tests."""
    dtypes._say.cache_clear()
    yield
    dtypes._say.cache_clear()


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have no bfloat16, the CPU has."""
    monkeypatch.setattr(dtypes, "_has_bfloat16", lambda device_type: device_type != "cuda")


@pytest.fixture
def new_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_has_bfloat16", lambda device_type: True)


def test_without_bfloat16_every_role_computes_in_float16(old_gpu: None) -> None:
    assert of_roles(config("bfloat16"), GPU) == [torch.float16] * 4


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_other_types_are_what_they_are(dtype: str, device: torch.device, old_gpu: None, caplog: Any) -> None:
    assert of_roles(config(dtype), device) == [getattr(torch, dtype)] * 4
    assert not caplog.records


@pytest.mark.usefixtures("new_gpu")
def test_where_there_is_bfloat16_it_is_used(caplog: Any) -> None:
    assert of_roles(config("bfloat16"), GPU) == of_roles(config("bfloat16"), CPU) == [torch.bfloat16] * 4
    assert not caplog.records


@pytest.mark.usefixtures("old_gpu")
def test_the_cpu_computes_in_bfloat16_whatever_the_gpu_has(caplog: Any) -> None:
    assert of_roles(config("bfloat16"), CPU) == [torch.bfloat16] * 4
    assert not caplog.records


REFERENCES: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {
    "as the model": ({}, torch.bfloat16, torch.float16),
    "not cast": (CAST, torch.float32, torch.float32),
    "float16": ({"ref_model.torch_dtype": "float16"}, torch.float16, torch.float16),
    "float16, not cast": (CAST | {"ref_model.torch_dtype": "float16"}, torch.float16, torch.float16),
    "bfloat16, not cast": (CAST | {"ref_model.torch_dtype": "bfloat16"}, torch.bfloat16, torch.float32),
    "float32": ({"ref_model.torch_dtype": "float32"}, torch.float32, torch.float32),
    "param_dtype, not cast": (CAST | {"ref_model.fsdp.mixed_precision.param_dtype": "bf16"}, torch.bfloat16, torch.float32),
}
"""Settings, the reference's type where there is bfloat16, and where there is none."""


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_may_have_a_type_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, there, missing = REFERENCES[name]
    for has, expected, others in ((True, there, torch.bfloat16), (False, missing, torch.float16)):
        monkeypatch.setattr(dtypes, "_has_bfloat16", lambda _, has=has: has)
        assert of_roles(config("bfloat16", **settings), GPU) == [others, others, expected, others]


def test_it_is_said_once(old_gpu: None, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        of_roles(config("bfloat16"), GPU)
    assert [record.getMessage() for record in caplog.records] == [
        "This GPU has no bfloat16; the models compute in float16 instead."
    ]
    of_roles(config("bfloat16", **CAST | {"ref_model.torch_dtype": "bfloat16"}), GPU)
    assert "float32 instead" in caplog.records[1].getMessage()
    assert len(caplog.records) == 2
