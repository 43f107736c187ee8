"""`ppoflow plan`: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest
import yaml

from flows.commands.plan import plan
from rl_core.errors import ConfigError, ModelError
from tests.rl_core.tools.plans import PARAMETERS, wide_config, wide_model


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = wide_model(tmp_path / "model")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(wide_config(model).model_dump(mode="json", exclude_unset=True)))
    return path


def test_a_training_that_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(config, gpus=1, gpu_memory=40, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["fits"] is True
    assert said["proposal"] is None
    assert said["longest"] == {"prompt_tokens": 64, "response_tokens": 64}
    assert said["models"]["actor"] == {"parameters": PARAMETERS, "trained": PARAMETERS, "gpus": 1, "gib": 0.74}
    peak = said["peak"]
    assert peak["phase"] == "update_actor"
    assert sum(peak["parts_gib"].values()) == pytest.approx(peak["gib"], abs=0.05)
    assert peak["gib"] == max(phase["gib"] for phase in said["ranks"][0])
    assert said["disk_gib"]["all"] == pytest.approx(3 * said["disk_gib"]["checkpoint"] + said["disk_gib"]["export"], abs=0.03)


def test_a_training_that_does_not_fit(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(config, gpus=1, gpu_memory=7.5, prompt_tokens=32)
    assert ended.value.code == 2
    said = capsys.readouterr().out
    assert "Does not fit" in said
    assert "prompts of 32" in said
    assert "It fits with --set '" in said
    [table] = [block for block in said.split("\n\n") if block.startswith("GiB on a GPU in")]
    assert len({len(line) for line in table.splitlines()}) == 1  # columns in line
    assert [line.split()[0] for line in table.splitlines()[-3:]] == ["update_critic", "update_actor", "save"]


def test_mistakes(config: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.name_or_path"):
        plan(config, overrides=["model.name_or_path=./nowhere"], gpus=1, gpu_memory=40)
    with pytest.raises(ConfigError, match="does not divide"):
        plan(config, overrides=["fsdp.ulysses_sequence_parallel_size=2"], gpus=3, gpu_memory=40)
    with pytest.raises(ConfigError, match="--gpu-memory"):
        plan(config, gpus=1)
