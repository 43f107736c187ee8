"""What a flow needs of a machine; and `ppoflow doctor` on a sound machine and on one where everything is broken."""

import json
import os
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rl_core.config.trainer import LaunchConfig
from rl_core.errors import ConfigError
from rl_core.tools.doctor import Check, guarded
from tasks.doctor import check_batch_system, check_launch, check_mlflow, check_prefect
from tests.pipeline import PPOFLOW, ROOT, environment, tiny_config


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver that shows two, on a host without a tool to list them."""
    monkeypatch.setenv("PATH", "/nowhere")
    for index in range(2):
        (tmp_path / "driver" / str(index)).mkdir(parents=True)
    return tmp_path / "driver"


@pytest.fixture
def dead() -> Iterator[str]:
    """The address of a port that is held but does not answer: a connection is refused."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "2"}


@pytest.mark.parametrize(
    ("variables", "found", "remedy"),
    [
        ({}, "none", None),
        (JOB, "SLURM job 7 on 3 node(s), 2 GPU(s) for it on this one", None),
        ({"PBS_JOBID": "9.host", "PBS_NGPUS": "1"}, "PBS job 9.host on 1 node(s), 1 GPU(s) for it on this one", None),
        (JOB | {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is empty, which hides the 2 GPU(s)", "Unset it"),
        (JOB | {"CUDA_VISIBLE_DEVICES": "0 1"}, "CUDA_VISIBLE_DEVICES is '0 1': blanks where commas belong", "Leave the commas"),
        (JOB | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 programs", "one torchrun per node"),
    ],
)
def test_batch_system(two_gpus: Path, variables: dict[str, str], found: str, remedy: str | None) -> None:
    check = guarded("batch system", lambda: check_batch_system(variables, two_gpus))
    assert check.state == ("pass" if remedy is None else "fail")
    assert check.found.startswith(found)
    assert (remedy or "") in check.remedy


def test_a_job_with_gpus_on_a_host_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    check = check_batch_system(JOB, tmp_path / "none")
    assert (check.state, check.found) == ("fail", "SLURM_GPUS_ON_NODE gives 2 GPU(s) to this job, but the host shows none")
    assert "nvidia-smi" in check.remedy


def test_launch() -> None:
    assert check_launch(LaunchConfig(device="cpu", nproc_per_node=4), 2).found == "4 rank(s) on this host, cpu"


def test_prefect(prefect: None, dead: str) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    check = check_prefect()
    assert check.state == "pass"
    assert check.found.endswith(f"the server at {PREFECT_API_URL.value()} answers")
    with temporary_settings({PREFECT_API_URL: f"{dead}/api"}):
        check = check_prefect()
    assert check.state == "fail"
    assert check.found.startswith(f"the server at {dead}/api does not answer (")
    assert "unset it" in check.remedy


def test_a_database_of_mlflow(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mlflow.db"
    assert check_mlflow(f"sqlite:///{path}") == Check("mlflow", "pass", f"{path} is made by the first run")
    assert not path.exists()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE x (y)")
        database.commit()
    assert check_mlflow(f"sqlite:///{path}") == Check("mlflow", "pass", f"{path} is in order")
    path.write_bytes(b"no database at all" * 100)
    damaged = check_mlflow(f"sqlite:///{path}")
    assert (damaged.state, damaged.found) == ("fail", f"{path} cannot be used (file is not a database)")
    (tmp_path / "file").write_text("")
    refused = guarded("mlflow", lambda: check_mlflow(f"sqlite:///{tmp_path}/file/mlflow.db"))
    assert refused.state == "fail"


def doctor(*arguments: str | Path, home: Path, **more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON document, stderr."""
    ended = subprocess.run(
        [*PPOFLOW, "doctor", *map(str, arguments), "--json"],
        cwd=ROOT, env=environment(home, **more), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def test_a_machine_where_everything_is_broken(tmp_path: Path, dead: str) -> None:
    """Each thing is said in one run, with its remedy, and nothing ends it early."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch/__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    (site / "torch-2.3.1.dist-info").mkdir()
    (site / "torch-2.3.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.3.1\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "x.yaml").write_text("model: {name_or_path: x}\ntrainer: {nothing: 1}\n")
    code, report, _ = doctor(
        tmp_path / "x.yaml",
        home=tmp_path / "file" / "home",
        PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]),
        PREFECT_API_URL=f"{dead}/api",
        MLFLOW_TRACKING_URI=dead.replace("//", "//me:secret@"),
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
        SLURM_GPUS_ON_NODE="two",
    )
    found = {check["name"]: Check(**check) for check in report["checks"]}
    assert (code, report["ok"]) == (2, False)
    failed = {"packages", "store", "torch", "prefect", "mlflow", "configuration"}
    assert {name for name, check in found.items() if check.state == "fail"} == failed | {"batch system"}
    assert {name for name, check in found.items() if check.state == "skip"} == {"gpus", "bfloat16", "gloo"}
    assert all(found[name].remedy for name in failed)
    assert "torch 2.3.1 (needed >=2.11)" in found["packages"].found
    assert "libcudart.so.12" in found["torch"].found
    assert "cannot be written" in found["store"].found
    assert "does not answer" in found["prefect"].found
    assert dead in found["mlflow"].found
    assert "secret" not in json.dumps(report)
    assert "SLURM_GPUS_ON_NODE = 'two' is not a number of GPUs" in found["batch system"].found
    assert "trainer.nothing" in found["configuration"].found


def test_this_machine_and_a_configuration(tmp_path: Path) -> None:
    code, report, said = doctor(tiny_config(tmp_path / "tiny"), "--port", "0", home=tmp_path / "home")
    found = {check["name"]: Check(**check) for check in report["checks"]}
    assert (code, report["ok"]) == (0, True), (report, said)
    assert found["gloo"].found.startswith("an all-reduce of 2 process(es) that met at port ")
    assert found["launch"].found == "1 rank(s) on this host, cpu"
    assert list(found)[-6:] == ["configuration", "launch", "extras", "model", "prompts", "own code"]
    with pytest.raises(ConfigError):
        check_launch(LaunchConfig(device="cuda"), 0)
