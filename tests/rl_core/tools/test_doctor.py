"""Machines with something broken, each described to the check that has to find it; and what a configuration needs."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config, parse_config
from rl_core.errors import ConfigError
from rl_core.tools import doctor, doctor_devices
from rl_core.tools.doctor import Check, guarded
from rl_core.tools.doctor_config import check_extras, config_checks
from rl_core.tools.doctor_devices import Gpu
from rl_core.tools.doctor_ranks import check_collective

A100, T4 = Gpu("NVIDIA A100", (8, 0), 80 * 10**9), Gpu("Tesla T4", (7, 5), 16 * 10**9)
BROKEN = Gpu("Tesla K80", (3, 7), 12 * 10**9, "CUDA error: no kernel image is available for execution on the device")


@pytest.mark.parametrize(("version", "state"), [((3, 10), "fail"), ((3, 11), "pass"), ((3, 12), "pass"), ((3, 13), "fail")])
def test_python(version: tuple[int, int], state: str) -> None:
    check = doctor.check_python(version)
    assert check.state == state
    assert ("PYTHON=python3.12" in check.remedy) == (state == "fail")


INSTALLED = {"torch": "2.13.0+cu130", "transformers": "5.24.0", "pydantic": "2.14.4"}
REQUIRED = ["torch>=2.11", "transformers>=5.17", "pydantic>=2.11,<3", 'peft>=0.21; extra == "lora"']


@pytest.mark.parametrize(
    ("changed", "state", "found"),
    [
        ({}, "pass", "3 as required: torch 2.13.0+cu130, transformers 5.24.0"),
        ({"torch": "2.3.1+cu121"}, "fail", "torch 2.3.1+cu121 (needed >=2.11)"),
        ({"torch": "2.9.0", "pydantic": "3.0"}, "fail", "torch 2.9.0 (needed >=2.11); pydantic 3.0 (needed <3,>=2.11)"),
        ({"transformers": None}, "fail", "transformers is missing (needed >=5.17)"),
        ({"torch": "2.12.0a0+git1"}, "pass", "3 as required: torch 2.12.0a0+git1, transformers 5.24.0"),
        ({"torch": "2.14.0"}, "warn", "newer than tested: torch 2.14.0 (tested up to 2.13)"),
    ],
)
def test_packages(changed: dict[str, str | None], state: str, found: str) -> None:
    check = doctor.check_packages(REQUIRED, (INSTALLED | changed).get)
    assert (check.state, check.found) == (state, found)
    assert ("pip install -r infra/requirements.txt" in check.remedy) == (state != "pass")


def test_this_environment_has_what_it_requires() -> None:
    assert doctor.check_packages().state == "pass"
    assert doctor.check_torch().state == "pass"


@pytest.mark.parametrize(
    ("present", "seen", "cuda", "state", "found", "remedy"),
    [
        (0, [], None, "warn", "none: the CPU computes", "Good for trials"),
        (2, [], None, "fail", "the driver shows 2, but this torch was built without CUDA", "Install torch with CUDA"),
        (2, [], "13.0", "fail", "the driver shows 2, but torch, built with CUDA 13.0, sees none", "a driver older than 13.0"),
        (3, [A100, A100, T4], "12.8", "pass", "2 × NVIDIA A100 (80 GB), 1 × Tesla T4 (16 GB)", ""),
        (2, [A100, BROKEN], "13.0", "fail", f"Tesla K80: {BROKEN.error}", "built for this GPU"),
    ],
)
def test_gpus(present: int, seen: list[Gpu], cuda: str | None, state: str, found: str, remedy: str) -> None:
    check = doctor_devices.check_gpus(present, seen, cuda)
    assert (check.state, check.found) == (state, found)
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("gpus", "state", "found"),
    [
        ([], "pass", "on the CPU"),
        ([A100], "pass", "on every GPU"),
        ([A100, T4], "warn", "not on Tesla T4 (compute capability 7.5): models in bfloat16 compute in float16 instead"),
    ],
)
def test_bfloat16(gpus: list[Gpu], state: str, found: str) -> None:
    check = doctor_devices.check_bfloat16(gpus)
    assert check.state == state
    assert check.found.startswith(found)
    assert ("model.torch_dtype" in check.remedy) == (state == "warn")


def test_little_shared_memory() -> None:
    assert doctor_devices.check_host(1, 8, 2**34, 2**26) == Check("host", "pass", "8 cores, 16.0 GiB of memory")
    small = doctor_devices.check_host(2, 8, 2**34, 2**26)
    assert (small.state, small.found) == ("warn", "8 cores, 16.0 GiB of memory, but only 64 MiB in /dev/shm, which NCCL uses")
    assert "--shm-size" in small.remedy
    assert doctor_devices.check_host(2, 8, 2**34, 2**33).state == "pass"


@pytest.mark.parametrize(("free", "state"), [(10**9, "fail"), (10**10, "warn"), (10**11, "pass")])
def test_disk(tmp_path: Path, free: int, state: str) -> None:
    check = doctor.check_disk(tmp_path / "not/made/yet", free)
    assert (check.state, check.found) == (state, f"{free / 1e9:.1f} GB free in {tmp_path}")
    assert ("PPOFLOW_HOME" in check.remedy) == (state != "pass")


def test_store(tmp_path: Path) -> None:
    assert guarded("store", lambda: doctor.check_home(tmp_path / "new")).state == "pass"
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    check = guarded("store", lambda: doctor.check_home(tmp_path / "file" / "home"))
    assert check == Check(
        "store", "fail", f"PPOFLOW_HOME: {tmp_path}/file/home cannot be written (Not a directory).",
        "Set PPOFLOW_HOME to a directory that you own.",
    )  # fmt: skip


def test_a_check_that_fails_itself_is_a_finding() -> None:
    check = guarded("odd", lambda: [][0])
    assert (check.state, check.found) == ("fail", "IndexError: list index out of range")


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = check_collective("gloo", 1, port)
    assert check.state == "fail"
    assert f"port {port} is in use on this host" in check.found
    assert check.remedy.startswith("Give another one (torchrun --master_port=N, or MASTER_PORT)")


def config(directory: Path, **overrides: Any) -> Config:
    """`overrides` have `__` for the dots of keys."""
    (directory / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (directory / "reward.py").write_text("import nothing_such\n\ndef compute_score(**given):\n    return 1.0\n")
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model/config.json").write_text("{}")
    (directory / "model/model.safetensors").write_bytes(b"0" * 20_000_000)
    values = {
        "model": {"name_or_path": str(directory / "model")},
        "data": {"source": {"kind": "files", "path": str(directory / "*.jsonl")}},
        "reward": {"kind": "function", "path": str(directory / "reward.py")},
    }
    return parse_config(values, {key.replace("__", "."): value for key, value in overrides.items()})


def checks(config: Config) -> dict[str, Check]:
    return {name: guarded(name, check) for name, check in config_checks(config)}


def test_a_configuration_whose_needs_are_met(tmp_path: Path) -> None:
    assert list(checks(config(tmp_path)).values()) == [
        Check("extras", "pass", "none needed"),
        Check("model", "pass", f"0.02 GB of weights in {tmp_path}/model"),
        Check("prompts", "pass", f"1 file(s) in {tmp_path}/*.jsonl"),
        Check("own code", "pass", f"{tmp_path}/reward.py"),
    ]


def test_files_that_are_missing(tmp_path: Path) -> None:
    settings = config(
        tmp_path,
        reward={"kind": "weighted", "parts": [
            {"weight": 1.0, "reward": {"kind": "function", "path": "nowhere.py"}},
            {"weight": 1.0, "reward": {"kind": "model", "name_or_path": "/no/judge"}},
        ]},
    )  # fmt: skip
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = checks(settings)
    assert {name: check.state for name, check in found.items()} == {
        "extras": "pass", "model": "fail", "reward": "fail", "prompts": "fail", "own code": "fail",
    }  # fmt: skip
    assert found["model"].found == f"model.name_or_path: {tmp_path}/model does not exist."
    assert found["model"].remedy.startswith("Give a directory of safetensors")
    assert found["reward"].found == "reward.name_or_path: /no/judge does not exist."
    assert "no file matches" in found["prompts"].found
    assert "reward.path = nowhere.py: there is no such file" in found["own code"].found


@pytest.mark.parametrize(
    ("overrides", "module", "remedy"),
    [
        ({"actor__lora": {"rank": 2}}, "peft", "pip install peft"),
        ({"model__name_or_path": "/x/y.gguf"}, "gguf", "pip install gguf"),
        ({"reward": {"kind": "math"}}, "math_verify", "pip install math-verify"),
        ({"reward": {"kind": "weighted", "parts": [{"weight": 1, "reward": {"kind": "math"}}]}}, "math_verify", "pip install"),
        (
            {"data__source": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9}},
            "reasoning_gym",
            "pip install reasoning",
        ),
    ],
)
def test_extras(tmp_path: Path, overrides: dict[str, Any], module: str, remedy: str) -> None:
    settings = config(tmp_path, **overrides)
    assert check_extras(settings, lambda name: True).found == f"{module} installed"
    check = check_extras(settings, lambda name: name != module)
    assert check.state == "fail"
    assert check.found.startswith(f"{module} is missing, which ")
    assert check.remedy.startswith(remedy)
    assert check_extras(config(tmp_path), lambda name: False).state == "pass"


def test_flash_attention_and_file_systems(tmp_path: Path) -> None:
    flash = config(tmp_path, model__attn_implementation="flash_attention_2", model__torch_dtype="bfloat16")
    assert check_extras(flash, lambda name: name != "flash_attn").state == "warn"
    remote = check_extras(config(tmp_path, model__name_or_path="nosuch://bucket/model"))
    assert remote.state == "fail"
    assert remote.found.startswith("nosuch://bucket/model cannot be opened")


def test_an_archive_that_is_missing(tmp_path: Path) -> None:
    name = f"simplecache::zip://x.gguf::file://{tmp_path}/x.whl"
    settings = config(tmp_path, model__name_or_path=name)
    check = checks(settings)["model"]
    assert (check.state, check.found) == ("fail", f"{name}: there is no {tmp_path}/x.whl")
    assert check_extras(settings, lambda module: True).found == "gguf installed"
    (tmp_path / "x.whl").write_text("")
    assert checks(settings)["model"].state == "pass"


def test_own_code_that_is_no_python(tmp_path: Path) -> None:
    settings = config(tmp_path, algorithm__policy_loss={"path": str(tmp_path / "loss.py"), "name": "loss"})
    (tmp_path / "loss.py").write_text("def loss(:\n")
    check = checks(settings)["own code"]
    assert check.state == "fail"
    assert "loss.py" in check.found
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss"):
        dict(config_checks(settings))["own code"]()
