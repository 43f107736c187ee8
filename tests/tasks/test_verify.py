"""`ppoflow verify`: every damage is found and named, and a registered version is followed back to the training that made it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_core.artifacts import MANIFEST, commit, fresh_scratch, open_artifact, set_aside
from rl_core.digests import digest_json
from rl_core.errors import ConfigError
from tasks.mlflow_registry import CHAMPION, DIGEST, registry
from tasks.mlflow_versions import register
from tasks.register_policy import lineage
from tasks.store import Key, Reference, produce
from tasks.store_verify import Checked, verify
from tasks.tracking import experiment_id

NAME = "verified"


@dataclass(frozen=True)
class Lineage:
    """What led to a registered version."""

    dataset: Reference
    base: Reference
    policy: Reference
    evaluation: Reference
    run: Path


@pytest.fixture
def made(home: Path) -> Iterator[Lineage]:
    """A version `models:/verified/1`, its champion, with all that it came from."""
    before = dict(os.environ)
    dataset, base = stored("tokenize_dataset", {"rows": "2"}), stored("convert_checkpoint", {"weights": "of the base"})
    run = home / "runs" / ("f" * 64)
    checkpoint = committed(run / "checkpoints" / "step_000002", {"tensors": "of step 2"}, "checkpoint", "f" * 64)
    committed(run / "policy", {"model.safetensors": "weights"}, "policy", open_artifact(checkpoint).digest)
    policy = stored(
        "train_policy",
        {"model.safetensors": "weights", "train.log": "took 3 s"},
        {"run.dataset": dataset.digest, "run.base": base.digest},
        notes=["train.log"],
    )
    report = {"report.json": json.dumps({"digests": {"policy": policy.digest}})}
    made = Lineage(dataset, base, policy, stored("evaluate_policy", report), run)
    register_it(made)
    yield made
    with registry("delete a test's version") as client:
        client.delete_registered_model(NAME)
        for model in client.search_logged_models([experiment_id("verification")]):
            client.delete_logged_model(model.model_id)
    os.environ.clear()
    os.environ.update(before)


def stored(stage: str, files: dict[str, str], components: dict[str, Any] | None = None, notes: Any = ()) -> Reference:
    components = {"stage": stage} | (components or {})

    def make(scratch: Path) -> dict[str, Any]:
        for name, text in files.items():
            (scratch / name).write_text(text)
        return {"step": 2, "run_key": "f" * 64}

    return produce(Key(stage, digest_json(components), components), make, notes=notes)


def committed(path: Path, files: dict[str, str], kind: str, key: str) -> Path:
    scratch = fresh_scratch(path)
    for name, text in files.items():
        (scratch / name).write_text(text)
    return commit(scratch, path, kind=kind, key=key, results={"step": 2}).path


def register_it(made: Lineage, **tags: str) -> None:
    with registry("register a test's policy") as client:
        client_tags = lineage(made.dataset, made.base, made.policy, made.evaluation) | tags
        experiment = experiment_id("verification")
        version, _ = register(client, NAME, made.policy.open(), tags=client_tags, experiment_id=experiment, run_id=None)
        client.set_registered_model_alias(NAME, CHAMPION, version.number)


def in_mlflow() -> Path:
    import mlflow

    return Path(mlflow.artifacts.download_artifacts(f"models:/{NAME}/1"))


def replaced(path: Path, text: str) -> None:
    """By a file of its own: the registered one is another name of the store's."""
    path.unlink()
    path.write_text(text)


def damaged(*targets: str) -> dict[str, list[str]]:
    return {one.what: one.damage for one in verify(targets) if one.damage}


def whats(checked: list[Checked]) -> list[str]:
    return [one.what for one in checked]


def test_all_is_whole(made: Lineage) -> None:
    checked = list(verify([f"models:/{NAME}@{CHAMPION}"]))
    assert {one.what: bool(one.damage or one.absent) for one in checked} == dict.fromkeys(
        [
            f"models:/{NAME}/1",
            *(f"{one.stage} {one.key[:8]}" for one in (made.dataset, made.base, made.policy, made.evaluation)),
            "run ffffffff policy",
            "run ffffffff step_000002",
        ],
        False,
    )
    assert {one.digest for one in checked if one.what.startswith(("models", "train_policy"))} == {made.policy.digest}
    everything = list(verify([]))
    assert len(everything) == 6
    assert not any(one.damage for one in everything)


def other_file_in_mlflow(made: Lineage) -> None:
    replaced(in_mlflow() / "model.safetensors", "Weights")


def forged_files_in_mlflow(made: Lineage) -> str:
    """Whole by themselves: files, manifest and its checksum agree."""
    directory = in_mlflow()
    shutil.rmtree(directory)
    return open_artifact(committed(directory, {"model.safetensors": "others"}, "train_policy", made.policy.key)).digest


def forged_tag(made: Lineage) -> None:
    digest = forged_files_in_mlflow(made)
    with registry("forge a tag") as client:
        client.set_model_version_tag(NAME, "1", DIGEST, digest)


def rot_in_the_store(made: Lineage) -> None:
    (made.dataset.path / "rows").write_text("3")


def another_base(made: Lineage) -> None:
    set_aside(made.base.path)
    committed(made.base.path, {"weights": "of another base"}, "convert_checkpoint", made.base.key)


def rot_in_the_export(made: Lineage) -> None:
    (made.run / "policy" / "model.safetensors").write_text("Weights")


def another_export(made: Lineage) -> None:
    shutil.rmtree(made.run / "policy")
    key = open_artifact(made.run / "checkpoints" / "step_000002").digest
    committed(made.run / "policy", {"model.safetensors": "others"}, "policy", key)


def another_checkpoint(made: Lineage) -> None:
    shutil.rmtree(made.run / "checkpoints" / "step_000002")
    committed(made.run / "checkpoints" / "step_000002", {"tensors": "others"}, "checkpoint", "f" * 64)


def another_lineage(made: Lineage) -> None:
    """The version's tags name a dataset on which the policy was not trained."""
    other = stored("tokenize_dataset", {"rows": "3"}, {"other": True})
    register_it(Lineage(other, made.base, made.policy, made.evaluation, made.run))


def another_comparison(made: Lineage) -> None:
    report = {"report.json": json.dumps({"digests": {"policy": "0" * 64}})}
    other = stored("evaluate_policy", report, {"other": True})
    register_it(Lineage(made.dataset, made.base, made.policy, other, made.run))


@pytest.mark.parametrize(
    ("damage", "what", "said"),
    [
        (other_file_in_mlflow, "models:/verified/1", "the content of model.safetensors was changed (its sha256 differs)"),
        (forged_files_in_mlflow, "models:/verified/1", "the version says"),
        (forged_tag, "train_policy", "the version says"),
        (rot_in_the_store, "tokenize_dataset", "the content of rows was changed (its sha256 differs)"),
        (another_base, "convert_checkpoint", "the version says"),
        (rot_in_the_export, "run ffffffff policy", "the content of model.safetensors was changed (its sha256 differs)"),
        (another_export, "run ffffffff policy", "model.safetensors is not what the stored policy has"),
        (another_checkpoint, "run ffffffff step_000002", "the policy was exported from another"),
        (another_lineage, "train_policy", "it was made from dataset"),
        (another_comparison, "evaluate_policy", "it compares the policy 000000"),
    ],
)
def test_each_link_of_the_chain_is_checked(made: Lineage, damage: Callable[[Lineage], None], what: str, said: str) -> None:
    damage(made)
    found = damaged(f"models:/{NAME}/1")
    assert [name.startswith(what) for name in found] == [True]
    ((sentence,),) = found.values()
    assert said in sentence


def test_what_is_not_here_is_said(made: Lineage, home: Path) -> None:
    shutil.rmtree(made.run)
    shutil.rmtree(made.dataset.path)
    absent = {one.what: one.absent for one in verify([f"models:/{NAME}/1"]) if one.absent}
    assert absent == {
        f"tokenize_dataset {made.dataset.key[:8]}": "it is not in this store",
        "run ffffffff policy": "its directory is not here",
    }
    assert damaged(f"models:/{NAME}/1") == {}


def test_rot_without_a_time_stamp_is_found(made: Lineage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.digests._stamp", lambda path: "untouched")
    made.base.open()
    (made.base.path / "weights").write_text("of the Base")
    made.base.open()
    assert damaged() == {f"convert_checkpoint {made.base.key[:8]}": ["the content of weights was changed (its sha256 differs)"]}


def test_what_is_asked_for(made: Lineage, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whats(list(verify([made.policy.key[:6]]))) == [f"train_policy {made.policy.key[:8]}"]
    assert whats(list(verify(["fff"]))) == ["run ffffffff step_000002", "run ffffffff policy"]
    assert whats(list(verify([str(made.run)]))) == ["run ffffffff step_000002", "run ffffffff policy"]
    monkeypatch.chdir(made.run)
    assert whats(list(verify(["checkpoints/step_000002"]))) == ["checkpoints/step_000002"]
    (made.base.path / MANIFEST).unlink()
    assert "manifest.json is missing" in damaged(str(made.base.path))[str(made.base.path)][0]
    for target, said in {
        "zzz": "neither a committed",
        "models:/verified": "Write models:/",
        "models:/nobody/1": "nobody",
    }.items():
        with pytest.raises(ConfigError, match=said):
            list(verify([target]))


def test_a_directory_under_another_name_and_a_key_of_other_components(made: Lineage, home: Path) -> None:
    shutil.move(made.base.path, made.base.path.with_name("0" * 64))
    forged = produce(Key("letters", "1" * 64, {"a": 1}), lambda scratch: {})
    assert damaged() == {
        "convert_checkpoint 00000000": [f"it is convert_checkpoint/{made.base.key} under another's name"],
        f"letters {forged.key[:8]}": ["its key is not the sha256 of its components"],
    }
