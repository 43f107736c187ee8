"""Registration and the gate, against MLflow's sqlite store; each test registers under a name of its own."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.artifacts import MANIFEST
from rl_core.config import Config, parse_config
from rl_core.errors import BrokenArtifact
from tasks.mlflow_registry import PREVIOUS, RegistryError, champion, registry
from tasks.mlflow_versions import ROLLED_BACK, restore_previous
from tasks.register_policy import DECISION, Registered, register_policy
from tasks.store import Reference
from tasks.tracking import LOGGED, RUN_KEY, experiment_id
from tests.registered import BASE, DATASET, tiny_evaluation, tiny_policy

REGISTER = register_policy.fn
"""The task's body: what Prefect adds is tested with the flow."""


def config(name: str, **gate: object) -> Config:
    return parse_config(
        {
            "model": {"name_or_path": "unused"},
            "data": {"source": {"kind": "files", "path": "unused"}},
            "reward": {"kind": "function", "path": "unused.py"},
            "registry": {"name": name, "experiment": "registration tests", "gate": gate},
        }
    )


def register(name: str, policy: Reference, evaluation: Reference, **gate: object) -> Registered:
    return REGISTER(config(name, **gate), DATASET, BASE, policy, evaluation)


def tags(name: str, version: str) -> dict[str, str]:
    with registry("look") as client:
        return dict(client.get_model_version(name, version).tags)


def test_the_first_policy_is_compared_with_the_base_model(registry_home: Path) -> None:
    better, worse = tiny_policy("first-better"), tiny_policy("first-worse")
    result = register("first-better", better, tiny_evaluation(better, reward=0.3, base=0.2))
    assert result == Registered("first-better", "1", ["candidate", "champion"], better.digest, created=True)
    assert register("first-worse", worse, tiny_evaluation(worse, reward=0.2, base=0.2)).aliases == ["candidate"], (
        "equal is not above"
    )
    assert champion("first-worse") is None


def test_the_version_tells_where_it_came_from_and_why_it_is_champion(registry_home: Path) -> None:
    policy = tiny_policy("lineage")
    evaluation = tiny_evaluation(policy, reward=0.5, base=0.25)
    register("lineage", policy, evaluation)
    kept = tags("lineage", "1")
    assert kept == {
        "ppoflow.digest": policy.digest,
        "ppoflow.run_key": policy.open().results["run_key"],
        "ppoflow.tokenize_dataset.key": DATASET.key,
        "ppoflow.tokenize_dataset.digest": DATASET.digest,
        "ppoflow.convert_checkpoint.key": BASE.key,
        "ppoflow.convert_checkpoint.digest": BASE.digest,
        "ppoflow.train_policy.key": policy.key,
        "ppoflow.train_policy.digest": policy.digest,
        "ppoflow.evaluate_policy.key": evaluation.key,
        "ppoflow.evaluate_policy.digest": evaluation.digest,
        "ppoflow.evaluation.reward": "0.5",
        "ppoflow.evaluation.accuracy": "0.25",
        DECISION: "becomes the champion: reward 0.5000 against 0.2500 of the base model, +0.2500, where more than +0.0000 is "
        "asked for",
    }


def test_registering_again_changes_nothing(registry_home: Path) -> None:
    policy = tiny_policy("twice")
    evaluation = tiny_evaluation(policy, reward=0.5)
    first = register("twice", policy, evaluation)
    before = tags("twice", "1")
    again = register("twice", policy, evaluation)
    assert (again.version, again.aliases, again.created) == (first.version, first.aliases, False)
    assert tags("twice", "1") == before


@pytest.mark.parametrize(
    ("gate", "reward", "holds"),
    [
        ({}, 0.51, True),
        ({}, 0.5, False),
        ({"min_improvement": 0.1}, 0.59, False),
        ({"min_improvement": 0.1}, 0.61, True),
        ({"min_improvement": -0.1}, 0.45, True),
        ({"metric": "accuracy", "min_improvement": 0.1}, 0.61, False),
        ({"metric": "accuracy", "min_improvement": 0.1}, 0.71, True),
    ],
)
def test_the_gate_against_a_champion(registry_home: Path, gate: dict[str, object], reward: float, holds: bool) -> None:
    """Accuracies are half the rewards; the champion has reward 0.5."""
    name = f"gate-{'-'.join(map(str, [*gate.values(), reward]))}".replace(".", "_")
    old, new = tiny_policy(name, 0), tiny_policy(name, 1)
    register(name, old, tiny_evaluation(old, reward=0.5))
    evaluation = tiny_evaluation(new, reward=reward, champion=(old.digest, 0.5))
    for _ in range(2):
        result = register(name, new, evaluation, **gate)
        assert result.version == "2"
        assert result.aliases == (["candidate", "champion"] if holds else ["candidate"])
    best = champion(name)
    assert best is not None
    assert best.digest == (new if holds else old).digest
    assert tags(name, "2").get(PREVIOUS) == ("1" if holds else None)
    assert ("becomes the champion" if holds else "does not become the champion") in tags(name, "2")[DECISION]


def test_a_champion_that_it_was_not_compared_with_stays(registry_home: Path) -> None:
    old, new = tiny_policy("overtaken", 0), tiny_policy("overtaken", 1)
    register("overtaken", old, tiny_evaluation(old, reward=0.5))
    result = register("overtaken", new, tiny_evaluation(new, reward=0.9))
    assert result.aliases == ["candidate"]
    assert "Run the same command again" in tags("overtaken", "2")[DECISION]


def test_what_somebody_rolled_back_does_not_come_back_by_itself(registry_home: Path) -> None:
    old, new = tiny_policy("rolled", 0), tiny_policy("rolled", 1)
    register("rolled", old, tiny_evaluation(old, reward=0.5))
    evaluation = tiny_evaluation(new, reward=0.9, champion=(old.digest, 0.5))
    register("rolled", new, evaluation)
    with registry("roll back") as client:
        restore_previous(client, "rolled")
    assert register("rolled", new, evaluation).aliases == ["candidate"]
    assert tags("rolled", "2")[ROLLED_BACK] == "1"


def test_a_changed_file_keeps_a_policy_from_becoming_champion(registry_home: Path) -> None:
    policy = tiny_policy("changed")
    register("changed", policy, tiny_evaluation(policy, reward=0.1))
    import mlflow

    registered = Path(mlflow.artifacts.download_artifacts("models:/changed/1"))
    (registered / "config.json").unlink()
    (registered / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BrokenArtifact, match="Version 1 of changed"):
        register("changed", policy, tiny_evaluation(policy, reward=0.9))
    assert champion("changed") is None
    policy.open()
    assert (policy.path / MANIFEST).exists()


def test_the_run_that_trained_it_has_the_version_and_the_evaluation(registry_home: Path) -> None:
    policy = tiny_policy("run")
    evaluation = tiny_evaluation(policy, reward=0.3)
    table_name = f"samples-{evaluation.key[:8]}.json"
    with registry("make a run") as client:
        experiment = experiment_id("registration tests")
        run_id = client.create_run(experiment, tags={RUN_KEY: policy.open().results["run_key"], LOGGED: "4"}).info.run_id
    for _ in range(2):
        register("run", policy, evaluation)
    with registry("look") as client:
        assert client.get_model_version("run", "1").run_id == run_id
        logged = {file.path.removeprefix("evaluation/") for file in client.list_artifacts(run_id, "evaluation")}
        assert logged == {"learning_curve.png", "report.json", "report.md", "rewards.png", table_name, "samples.md"}
        assert client.get_run(run_id).data.metrics == {"evaluation/policy/reward": 0.3, "evaluation/policy/accuracy": 0.15}
        table = client.load_table(experiment, f"evaluation/{table_name}", [run_id])
    assert table.to_dict("records") == [
        {
            "prompt": "1+1=", "ground_truth": "two", "base_response": "base", "base_reward": 0.5, "policy_response": "policy",
            "policy_reward": 0.5,
        }
    ]  # fmt: skip


CONTENDER = """
import sys
from tests.tasks.test_register_policy import register
from tests.registered import tiny_evaluation, tiny_policy
name, seed, reward, champion = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
policy = tiny_policy(name, seed)
print(register(name, policy, tiny_evaluation(policy, reward, champion=(champion, 0.5))).aliases)
"""


def test_two_at_once_do_not_overwrite_each_other(registry_home: Path) -> None:
    """Both beat the champion that they were compared with; who comes second is not promoted over the one it has not met."""
    old = tiny_policy("race")
    register("race", old, tiny_evaluation(old, reward=0.5))
    for seed in (1, 2):
        tiny_policy("race", seed)
    command = [sys.executable, "-c", CONTENDER, "race"]
    contenders = [
        subprocess.Popen([*command, str(seed), reward, old.digest], stdout=subprocess.PIPE, text=True)
        for seed, reward in ((1, "0.9"), (2, "0.6"))
    ]
    answers = [process.communicate(timeout=120)[0] for process in contenders]
    assert sorted("champion" in answer for answer in answers) == [False, True]


def test_a_dead_server_is_said_and_nothing_is_lost(registry_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("dead")
    evaluation = tiny_evaluation(policy, reward=0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # nobody listens there
        with monkeypatch.context() as dead:
            dead.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            dead.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            with pytest.raises(RegistryError, match=r"could not register the policy as dead.*run the same command again"):
                register("dead", policy, evaluation)
    assert register("dead", policy, evaluation).aliases == ["candidate", "champion"]
