"""The configurations that come with the project are valid, and what they leave to the environment."""

from pathlib import Path

import pytest

from rl_core.config import load_config, parse_config
from rl_core.errors import ConfigError

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_is_valid(path: Path) -> None:
    assert load_config(path).registry.name


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", "/data")
    monkeypatch.delenv("NOT_SET", raising=False)
    values = {
        "model": {"name_or_path": "${NOT_SET:-here}/model"},
        "data": {"source": {"kind": "files", "path": "${DATA_DIR}/${NOT_SET:-}x.jsonl"}, "suffix": " ${x} $DATA_DIR"},
        "reward": {"kind": "function", "path": "r.py"},
        "registry": {"name": "m"},
    }
    config = parse_config(values)
    assert config.model.name_or_path == "here/model"
    assert config.data.source.path == "/data/x.jsonl"
    assert config.data.suffix == " ${x} $DATA_DIR"
    with pytest.raises(ConfigError, match=r"registry\.experiment.*NOT_SET"):
        parse_config(values, {"registry.experiment": "${NOT_SET}"})
