"""One case of a bench on real ranks: real steps on nothing but a model's config.json, and nothing kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import parse_config
from tests.pipeline import tiny_settings
from tests.ranks import run_ranks

PROMPT, RESPONSE = 9, 4


def measured(rank: int, directory: Path, overrides: dict[str, Any], random: bool) -> dict[str, Any]:
    """What `measure` says on one of two ranks."""
    from rl_core.distributed import World
    from rl_core.tools.bench import as_benched, measure

    world = World(rank, 2, torch.device("cpu"))
    values = json.loads((directory / "settings.json").read_text(encoding="utf-8"))
    config = as_benched(parse_config(values, overrides).settled(2), steps=3)
    return measure(config, directory / "work", world, warm=1, prompt_tokens=PROMPT, random=random)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    (tmp_path / "settings.json").write_text(json.dumps(tiny_settings(tmp_path)), encoding="utf-8")
    (tmp_path / "work").mkdir()
    return tmp_path


def test_steps_on_random_weights_of_a_shape(directory: Path) -> None:
    for path in (directory / "model").iterdir():
        if path.name != "config.json":
            path.unlink()
    (directory / "reward.py").unlink()
    (directory / "prompts.jsonl").unlink()
    overrides = {"trainer.per_device_train_batch_size": 3, "rollout.n": 2, "algorithm.ppo_epochs": 2, "rollout.max_new_tokens": 4}
    result, nothing = run_ranks(measured, 2, directory, overrides, True)
    assert nothing == {}
    assert (result["ranks"], result["responses"], result["mini_batch"]) == (2, 16, 16)
    assert (result["micro_batch"], result["accumulation"]) == (3, 3), "8 responses on each rank"
    assert result["tokens_per_step"] == 16 * (PROMPT + RESPONSE)
    assert result["metrics_of_last_step"]["prompt_length/mean"] == PROMPT
    assert result["metrics_of_last_step"]["response_length/min"] == RESPONSE, "no response ends early"
    assert result["metrics_of_last_step"]["actor/grad_norm"] > 0
    assert len(result["seconds_of_steps"]) == 2, "the first one is not measured"
    assert result["seconds"]["step"] == pytest.approx(sum(result["seconds_of_steps"]) / 2, abs=1e-3)
    assert result["tokens_per_s"] == pytest.approx(2 * result["tokens_per_s_per_rank"])
    assert result["tokens_per_s"] == pytest.approx(16 * (PROMPT + RESPONSE) / result["seconds"]["step"], rel=1e-2)
    phases = {"gen", "old_log_prob", "ref", "values", "update_critic", "update_actor"}
    assert set(result["tflop"]) == set(result["mfu"]) == phases | {"step"}
    assert result["tflop"]["step"] == pytest.approx(sum(result["tflop"][name] for name in phases))
    for name in ("update_actor", "step"):
        peak = result["matmul_tflops_per_rank"] * 2
        assert result["mfu"][name] == pytest.approx(result["tflop"][name] / result["seconds"][name] / peak, rel=1e-2)
    assert result["gib_peak"] >= result["gib_built"] > 0.05
    work = directory / "work"
    assert not list(work.glob("**/step_*")), "no checkpoint"
    assert not list(work.glob("**/*.safetensors"))
    assert not list(work.glob("**/weights"))


def test_the_models_own_weights_without_critic_and_reference(directory: Path) -> None:
    overrides = {"algorithm.adv_estimator": "grpo", "rollout.n": 2, "algorithm.kl_in": "none"}
    result, _ = run_ranks(measured, 2, directory, overrides, False)
    assert set(result["mfu"]) == {"gen", "old_log_prob", "update_actor", "step"}
    assert result["metrics_of_last_step"]["critic/vf_loss"] is None
    (base,) = (directory / "work").glob("*/base/manifest.json")
    assert json.loads(base.read_text(encoding="utf-8"))["files"], "converted once, for the cases that follow"
