"""What is built by name: attention that the machine and the class have, buffers as the class computes them, errors for users."""

import fcntl
import json
import logging
from pathlib import Path

import pytest
import torch

from rl_core.config.model import ModelConfig
from rl_core.errors import ModelError
from rl_core.models import auto
from rl_core.models.auto import loading, model_of
from rl_core.models.build import empty_model
from rl_core.rollout.engine import RolloutEngine
from tests.rl_core.models.cases import family
from tests.rl_core.models.custom import code_home, custom_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family(tmp_path_factory.mktemp("auto") / "llama", "llama-tied")


@pytest.mark.parametrize(("wanted", "taken"), [("sdpa", "sdpa"), ("eager", "eager"), ("flash_attention_2", "sdpa")])
def test_attention(llama: Path, wanted: str, taken: str, caplog: pytest.LogCaptureFixture) -> None:
    """flash-attn is not installed here: every model takes sdpa then, and one sentence says so."""
    auto._say.cache_clear()
    settings = ModelConfig(name_or_path=str(llama), attn_implementation=wanted)
    with caplog.at_level(logging.WARNING, logger="rl_core"):
        models = [empty_model(llama, settings), empty_model(llama, settings, torch.bfloat16)]
        models.append(RolloutEngine(llama, torch.float32, "cpu", settings).model)
    assert [model.config._attn_implementation for model in models] == [taken] * 3
    said = [record.getMessage() for record in caplog.records if "flash" in record.getMessage()]
    assert len(said) == (wanted == "flash_attention_2")


def test_a_class_without_the_wanted_attention_has_its_own() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    assert not BloomForCausalLM._supports_sdpa
    config = BloomConfig(vocab_size=102, hidden_size=32, n_layer=1, n_head=4)
    for wanted in ("sdpa", "flash_attention_2"):
        with torch.device("meta"):
            assert model_of(config, torch.float32, attention=wanted).config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "nothing"}, "has model type `nothing` but Transformers does not recognize"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"model_type": "t5"}, "Unrecognized configuration class"),
    ],
)
def test_a_wrong_config(llama: Path, tmp_path: Path, change: dict[str, str], reason: str) -> None:
    settings = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ModelError, match=rf"^model\.name_or_path: .*{tmp_path}[\s\S]*{reason}"):
        empty_model(tmp_path, ModelConfig(name_or_path="m"))


def test_code_of_its_own_is_loaded_by_one_process_at_a_time(tmp_path: Path) -> None:
    """transformers copies it to a shared place, not atomically."""
    source = custom_model(tmp_path / "m")
    with code_home(tmp_path / "home") as home:
        with loading(source, "nothing", trusted=False):
            assert not home.exists()
        with loading(source, "nothing", trusted=True):
            [lock] = home.rglob("*.lock")
            with lock.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
