"""`ppoflow bench step`: the cases of a sweep, and one sweep of three models of which one can be measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.commands.bench import cases
from rl_core.errors import EXIT_USER, ConfigError
from tests.pipeline import ppoflow, tiny_settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings = tiny_settings(tmp_path)
    settings["trainer"] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def batches(config: Path, *sweep: str, overrides: list[str] | None = None) -> list[tuple[Any, ...]]:
    """Of each case what the sweep sets, and micro-batch, token budget and prompts of a step."""
    found = []
    for settings, _, settled in cases(config, overrides or [], list(sweep)):
        trainer = settled.trainer
        micro, tokens = trainer.per_device_train_batch_size, trainer.max_tokens_per_micro_batch
        found.append((*settings.values(), micro, tokens, trainer.train_batch_size))
    return found


def test_micro_batches_at_the_same_batch(config: Path) -> None:
    assert batches(config, "micro_batch=2,4,8") == [(2, 2, None, 8), (4, 4, None, 8), (8, 8, None, 8)]
    budget = ["trainer.max_tokens_per_micro_batch=99"]
    assert batches(config, overrides=budget) == [(4, 99, 8)]
    assert batches(config, "micro_batch=2", overrides=budget) == [(2, 2, None, 8)]
    other = "trainer.per_device_train_batch_size=2"
    assert batches(config, "trainer.per_device_train_batch_size=2") == [(2, 2, None, 4)], "accumulation as configured"
    assert batches(config, "micro_batch=1", overrides=[other]) == [(1, 1, None, 4)]


def test_sweeps_are_combined_and_values_have_types(config: Path) -> None:
    found = cases(config, ["rollout.n=2"], ["fsdp.activation_checkpointing=false,true", "actor.learning_rate=1e-4,2"])
    assert [settings for settings, _, _ in found] == [
        {"fsdp.activation_checkpointing": on, "actor.learning_rate": rate} for on in (False, True) for rate in ("1e-4", 2)
    ]
    assert [(made.fsdp.activation_checkpointing, made.actor.learning_rate, made.rollout.n) for _, _, made in found] == [
        (on, rate, 2) for on in (False, True) for rate in (1e-4, 2.0)
    ]
    ((_, _, made),) = cases(config, [], ["model_mapping={actor: [0], critic: [1]}"])
    assert (made.model_mapping.actor, made.model_mapping.critic) == ([0], [1])


@pytest.mark.parametrize("sweep", ["micro_batch", "=1", "micro_batch=", "rollout.n=[1"])
def test_a_sweep_that_is_none(config: Path, sweep: str) -> None:
    with pytest.raises(ConfigError, match="--sweep takes key=value"):
        cases(config, [], [sweep])


def test_a_mistake_in_any_case_is_said_before_the_first_is_run(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"fsdp\.activation_checkpoint"):
        cases(config, [], ["fsdp.activation_checkpoint=true"])
    with pytest.raises(ConfigError, match=r"not a multiple of rollout\.n = 3"):
        cases(config, [], ["rollout.n=1,3"])


def test_a_case_that_does_not_fit_and_one_that_is_refused_leave_the_others(config: Path, tmp_path: Path) -> None:
    """The second model has more bytes than a process has addresses; the third does not exist."""
    huge = tmp_path / "huge"
    huge.mkdir()
    shape = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    (huge / "config.json").write_text(json.dumps(shape | {"intermediate_size": 2**41}), encoding="utf-8")
    models = f"model.name_or_path={tmp_path / 'model'},{huge},{tmp_path / 'none'}"
    command = ["bench", "step", config, "--sweep", models, "--random-weights", "--prompt-tokens", 6, "--warm", 0, "--steps", 1]
    result = ppoflow(*map(str, command), "--json", "--out", tmp_path / "out.json", home=tmp_path / "home")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    good, large, missing = report["cases"]
    assert good["settings"] == {"model.name_or_path": str(tmp_path / "model")}
    assert good["tokens_per_step"] == 8 * (6 + 4)
    assert "error" not in good
    assert (large["error"], missing["error"]) == ("out of memory", "refused")
    assert "Less is needed with" in large["message"]
    assert "does not exist" in missing["message"]
    assert "Case 3 of 3: model.name_or_path=" in result.stderr
    assert list((tmp_path / "home" / "bench").iterdir()) == [], "nothing is kept"


def test_no_case_measured_is_the_users_turn_and_the_table_says_why(config: Path, tmp_path: Path) -> None:
    result = ppoflow("bench", "step", config, "--sweep", "model.name_or_path=./none", home=tmp_path / "home")
    assert result.returncode == EXIT_USER, result.stderr
    assert "refused" in result.stdout
    assert "./none does not exist" in result.stdout.replace(str(Path.cwd()), ".")


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.commands.bench import _print

    case: dict[str, Any] = {
        "settings": {}, "ranks": 2, "device": "cpu", "responses": 8, "prompt_tokens": 6, "response_tokens": 4, "micro_batch": 4,
        "accumulation": 2, "seconds": {"gen": 1.0, "adv": 0.5, "update_actor": 2.5, "step": 4.0}, "tokens_per_s": 20.0,
        "tflop": {"gen": 1.0, "update_actor": 10.0, "step": 11.0}, "mfu": {"gen": 0.05, "update_actor": 0.2, "step": 0.1375},
        "matmul_tflops_per_rank": 10.0, "gib_peak": 1.5, "formula": "MFU = …",
    }  # fmt: skip
    _print([case])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["update_actor", "2.500", "62%", "2.00", "20.0%"] in rows
    assert ["adv", "0.500", "12%"] in rows
    assert ["20", "tokens/s,", "micro-batches", "4", "×", "2,", "1.50", "GiB"] in rows
    _print([case | {"settings": {"micro_batch": 4}}, {"settings": {"micro_batch": 8}, "error": "out of memory", "message": "…"}])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["4", "4", "×", "2", "4.000", "1.000", "0.000", "2.500", "20", "13.8%", "1.50"] in rows
    assert ["8", "out", "of", "memory"] in rows
    assert ["micro_batch=8:", "out", "of", "memory:", "…"] in rows
