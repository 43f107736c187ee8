"""Against MLflow's sqlite store; each test registers under a name of its own."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.artifacts import MANIFEST
from rl_core.errors import BrokenArtifact, ConfigError
from tasks.mlflow_registry import (
    CHAMPION,
    DIGEST,
    PREVIOUS,
    RegistryError,
    champion,
    champion_version,
    find_version,
    registry,
    resolve_model_uri,
)
from tasks.mlflow_versions import make_champion, register
from tasks.store import Reference
from tasks.tracking import experiment_id
from tests.registered import forget_downloads, tiny_policy


def registered(name: str, policy: Reference, **tags: str) -> tuple[str, bool]:
    """Version and whether it is new."""
    with registry("register a test's policy") as client:
        version, created = register(
            client, name, policy.open(), tags=tags, experiment_id=experiment_id("registry tests"), run_id=None
        )
    return version.number, created


def crown(name: str, version: str) -> None:
    with registry("promote a test's policy") as client:
        make_champion(client, find_version(client, name, version))


def files_in_mlflow(name: str, version: str) -> Path:
    import mlflow

    return Path(mlflow.artifacts.download_artifacts(f"models:/{name}/{version}"))


def test_registered_files_open_with_transformers(registry_home: Path) -> None:
    import mlflow
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = tiny_policy("opens")
    registered("opens", policy)
    crown("opens", "1")
    directory = mlflow.artifacts.download_artifacts("models:/opens@champion")
    downloaded, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (directory, policy.path))
    assert (
        AutoTokenizer.from_pretrained(directory)("a")["input_ids"] == AutoTokenizer.from_pretrained(policy.path)("a")["input_ids"]
    )
    for name, tensor in trained.state_dict().items():
        assert torch.equal(downloaded.state_dict()[name], tensor), name
    assert os.stat(Path(directory) / "model.safetensors").st_ino == os.stat(policy.path / "model.safetensors").st_ino, "no copy"
    assert resolve_model_uri("models:/opens@champion") == resolve_model_uri("models:/opens/1") == Path(directory)


def test_registering_again_finds_the_version_and_updates_its_tags(registry_home: Path) -> None:
    policy, other = tiny_policy("again"), tiny_policy("again", seed=1)
    assert registered("again", policy, colour="red") == ("1", True)
    assert registered("again", other) == ("2", True)
    assert registered("again", policy, colour="blue") == ("1", False)
    with registry("look") as client:
        assert {int(version.version) for version in client.search_model_versions("name = 'again'")} == {1, 2}
        assert client.get_model_version("again", "1").tags == {"colour": "blue", DIGEST: policy.digest}


def test_an_interrupted_registration_is_completed(registry_home: Path) -> None:
    policy = tiny_policy("interrupted")
    with registry("leave a half-made model") as client:
        model = client.create_logged_model(experiment_id("registry tests"), "interrupted", tags={DIGEST: policy.digest})
    assert registered("interrupted", policy) == ("1", True)
    with registry("look") as client:
        assert client.get_model_version("interrupted", "1").source == f"models:/{model.model_id}"
    assert resolve_model_uri("models:/interrupted/1").is_dir()


def test_champion_is_none_until_there_is_one(registry_home: Path) -> None:
    assert champion("nobody") is None
    policy = tiny_policy("first")
    registered("first", policy)
    assert champion("first") is None
    crown("first", "1")
    found = champion("first")
    assert found is not None
    assert (found.name, found.version, found.digest) == ("first", "1", policy.digest)
    assert (found.path / "config.json").read_bytes() == (policy.path / "config.json").read_bytes()


def test_a_policy_that_is_the_champion_is_compared_with_the_one_it_replaced(registry_home: Path) -> None:
    policies = [tiny_policy("chain", seed) for seed in range(2)]
    for number, policy in enumerate(policies, start=1):
        registered("chain", policy)
        crown("chain", str(number))
    first, second = policies
    compared = [champion("chain"), champion("chain", second.digest), champion("chain", first.digest)]
    assert [found and found.digest for found in compared] == [second.digest, first.digest, second.digest]


def test_a_changed_file_is_noticed(registry_home: Path) -> None:
    policy = tiny_policy("tampered")
    registered("tampered", policy)
    crown("tampered", "1")
    weights = files_in_mlflow("tampered", "1") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BrokenArtifact, match=r"Version 1 of tampered is not what was registered.*model\.safetensors"):
        champion("tampered")
    with pytest.raises(BrokenArtifact):
        resolve_model_uri("models:/tampered@champion")


def test_rot_without_a_time_stamp_is_found_before_promotion(registry_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.digests._stamp", lambda path: "untouched")
    registered("rotten", tiny_policy("rotten"))
    weights = resolve_model_uri("models:/rotten/1") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    resolve_model_uri("models:/rotten/1")  # everyday use trusts the time stamps
    with registry("promote") as client, pytest.raises(BrokenArtifact):
        make_champion(client, find_version(client, "rotten", "1"))
    with registry("look") as client:
        assert champion_version(client, "rotten") is None


def test_an_empty_model_of_somebody_else_is_refused(registry_home: Path) -> None:
    with registry("register an empty model") as client:
        model = client.create_logged_model(experiment_id("registry tests"), "empty")
        client.create_registered_model("empty")
        client.create_model_version("empty", f"models:/{model.model_id}", model_id=model.model_id)
        client.set_registered_model_alias("empty", CHAMPION, "1")
    with pytest.raises(ConfigError, match="Version 1 of empty was not registered by ppoflow"):
        champion("empty")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("models:/absent@champion", "MLflow has no registered model absent .*there are: .*known.*ppoflow run"),
        ("models:/known@best", r"no version or alias best.*versions \(1\) or aliases \(champion → 1\)"),
        ("models:/known/7", "no version or alias 7"),
        ("models:/known", "Write models:/name@champion or models:/name/3"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(registry_home: Path, uri: str, message: str) -> None:
    registered("known", tiny_policy("known"))
    crown("known", "1")
    with pytest.raises(ConfigError, match=message):
        resolve_model_uri(uri)


def test_replacing_a_champion_remembers_it(registry_home: Path) -> None:
    for seed in range(3):
        registered("replaced", tiny_policy("replaced", seed))
    for version in ("1", "3", "3"):
        crown("replaced", version)
    with registry("look") as client:
        assert PREVIOUS not in client.get_model_version("replaced", "1").tags
        assert client.get_model_version("replaced", "3").tags[PREVIOUS] == "1"


@pytest.fixture
def server(registry_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An MLflow server that keeps the files to itself (clients up- and download them), over the same database."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", os.environ["MLFLOW_TRACKING_URI"], "--artifacts-destination", str(tmp_path / "served"),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    log = (tmp_path / "server.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield address
    os.killpg(process.pid, 9)
    process.wait()
    log.close()


def test_over_the_network_files_are_uploaded_and_downloaded_once(registry_home: Path, server: str) -> None:
    policy = tiny_policy("remote")
    with registry("register over the network") as client:
        experiment = client.create_experiment("served")
        version, _ = register(client, "remote", policy.open(), tags={}, experiment_id=experiment, run_id=None)
        make_champion(client, version)
    shutil.rmtree(policy.path)
    forget_downloads(registry_home)
    found = champion("remote")
    assert found is not None
    assert found.path == registry_home / "downloads" / "models" / policy.digest
    assert (found.path / MANIFEST).exists()

    weights = found.path / "model.safetensors"
    inode = weights.stat().st_ino
    champion("remote")
    assert weights.stat().st_ino == inode, "not downloaded again"
    weights.write_bytes(b"damaged")
    again = champion("remote")
    assert again == found, "a damaged download is set aside and fetched again"
    assert weights.stat().st_size > 1000


def test_a_dead_server_is_said_after_a_bounded_wait(registry_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:  # takes connections, never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@{address}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        with pytest.raises(RegistryError, match=f"MLflow at http://{address} could not tell the champion of x") as error:
            champion("x")
    assert "secret" not in str(error.value)
    assert "MLFLOW_TRACKING_URI" in str(error.value)
