"""Real evaluations of tiny models, one torchrun child for each."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.config import Config, parse_config
from rl_core.errors import ConfigError
from rl_core.models.source import resolve
from tasks import evaluate_policy, tokenize_dataset
from tasks.evaluate_policy import evaluate, key, model_keys
from tasks.mlflow_registry import Champion
from tasks.publish import show_in_mlflow, show_in_prefect
from tasks.store import Key, Reference, produce
from tests.pipeline import tiny_settings
from tests.registered import shared_home, tiny_policy
from tests.tiny import tiny_model


class Inputs:
    """What an evaluation takes, with a vocabulary and prompts that all its models share."""

    def __init__(self, directory: Path) -> None:
        self.settings = tiny_settings(directory)
        source = resolve(self.config().model)
        self.dataset = tokenize_dataset.tokenize(tokenize_dataset.key(self.config(), source), self.config(), source)

        def base(scratch: Path) -> dict:
            tiny_model(scratch)
            return {}

        self.base = produce(Key("convert_checkpoint", "base-of-the-evaluation", {}), base)
        self.policy = tiny_policy("evaluated", seed=1)
        other = tiny_policy("evaluated", seed=2)
        self.champion = Champion("evaluated", "1", other.digest, other.path)

    def config(self, **overrides: object) -> Config:
        return parse_config(self.settings, {name.replace("__", "."): value for name, value in overrides.items()})

    def evaluate(self, champion: Champion | None = None, config: Config | None = None) -> Reference:
        given = (config or self.config(), self.dataset, self.base, self.policy, champion)
        return evaluate(key(*given), *given)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inputs]:
    with shared_home(tmp_path_factory):
        yield Inputs(tmp_path_factory.mktemp("evaluated"))


def evaluations() -> dict[str, int]:
    """The evaluations of single models that are in the store, and when they were made."""
    store = Key(evaluate_policy.MODEL_STAGE.name, "x", {}).path.parent
    return {path.name: path.stat().st_mtime_ns for path in store.glob("[!.]*")}


def test_base_and_policy_answer_the_same_prompts(inputs: Inputs) -> None:
    reference = inputs.evaluate()
    assert reference.state == "computed"
    report = json.loads((reference.path / "report.json").read_text(encoding="utf-8"))
    assert report["champion"] is None
    assert report["digests"] == {"base": inputs.base.digest, "champion": None, "policy": inputs.policy.digest}

    rows = {}
    for name in ("base", "policy"):
        lines = (reference.path / "samples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows[name] = [json.loads(line) for line in lines]
        rewards = [sum(c.isdigit() for c in row["response"]) / max(1, len(row["response"])) for row in rows[name]]
        assert [row["reward"] for row in rows[name]] == rewards
        assert report[name]["reward"]["mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert report[name]["prompts"] == len(rewards) == 8
    assert [row["prompt_id"] for row in rows["base"]] == [row["prompt_id"] for row in rows["policy"]]
    assert report["base"]["kl"]["mean"] == 0
    assert report["policy"]["kl"]["mean"] > 0

    assert (reference.path / "report.md").read_text(encoding="utf-8").startswith("|  | base | policy |")
    assert len((reference.path / "samples.md").read_text(encoding="utf-8").splitlines()) == 4 + 4, "evaluation.samples is 4"
    for plot in ("learning_curve.png", "rewards.png"):
        assert (reference.path / plot).read_bytes().startswith(b"\x89PNG")


def test_each_model_is_evaluated_once(inputs: Inputs) -> None:
    first = inputs.evaluate()
    before = evaluations()
    assert inputs.evaluate() == Reference(first.stage, first.key, first.digest, "reused")

    compared = inputs.evaluate(inputs.champion)
    after = evaluations()
    assert {name: after[name] for name in before} == before, "neither base nor policy again"
    assert len(after) == len(before) + 1
    report = json.loads((compared.path / "report.json").read_text(encoding="utf-8"))
    assert report["digests"]["champion"] == inputs.champion.digest

    itself = Champion("evaluated", "2", inputs.policy.digest, inputs.policy.path)
    report = json.loads((inputs.evaluate(itself).path / "report.json").read_text(encoding="utf-8"))
    assert evaluations() == after
    assert report["champion"] == report["policy"]


def test_what_decides_the_keys(inputs: Inputs, tmp_path: Path) -> None:
    def keys(config: Config) -> tuple[str, str]:
        given = (config, inputs.dataset, inputs.base, inputs.policy, None)
        return model_keys(*given)["policy"].value, key(*given).value

    answers, comparison = keys(inputs.config())
    for same in ({"launch__threads_per_rank": 2}, {"rollout__batch_size": 1}, {"registry__name": "another"}):
        assert keys(inputs.config(**same)) == (answers, comparison), same
    assert keys(inputs.config(evaluation__samples=1))[0] == answers
    assert keys(inputs.config(evaluation__samples=1))[1] != comparison
    assert keys(inputs.config(evaluation__max_new_tokens=4)) == (answers, comparison), "what null means anyway"
    for other in ({"evaluation__seed": 1}, {"rollout__max_new_tokens": 5}, {"model__torch_dtype": "bfloat16"}):
        assert keys(inputs.config(**other))[0] != answers, other

    moved, changed = tmp_path / "moved.py", tmp_path / "changed.py"
    code = Path(inputs.settings["reward"]["path"]).read_text(encoding="utf-8")
    moved.write_text(code, encoding="utf-8")
    changed.write_text(code.replace("isdigit", "isalpha"), encoding="utf-8")
    assert keys(inputs.config(reward__path=str(moved)))[0] == answers
    assert keys(inputs.config(reward__path=str(changed)))[0] != answers


def test_a_champion_with_another_vocabulary_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "other")
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"registry\.name: the champion of theirs \(version 7\) has another vocabulary"):
        inputs.evaluate(Champion("theirs", "7", "f" * 64, directory))


def test_without_mlflow_the_report_is_only_warned_about(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = inputs.evaluate().open()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    show_in_mlflow(evaluation, "any run")
    assert "could not log the evaluation: API request to http://127.0.0.1:9" in caplog.text
    assert str(evaluation.path) in caplog.text


def test_the_report_is_shown_in_prefect(inputs: Inputs) -> None:
    from prefect import flow
    from prefect.artifacts import Artifact
    from prefect.testing.utilities import prefect_test_harness

    evaluation = inputs.evaluate().open()
    show_in_prefect(evaluation)  # outside a flow: nothing to show it on

    @flow
    def showing() -> None:
        show_in_prefect(evaluation)

    with prefect_test_harness(server_startup_timeout=90):
        showing()
        artifact = Artifact.get("evaluation")
    assert artifact is not None
    assert isinstance(artifact.data, str)
    for part in ("| reward |", "![learning_curve](data:image/png;base64,iVBOR", "![rewards](data:image", "# Answers"):
        assert part in artifact.data
