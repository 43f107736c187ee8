"""A fast path that fails at its first use – no compiler, an old driver, a model's own code – costs speed, not the run."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.errors import NonFiniteError
from rl_core.rollout.decode import SlotDecoder
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights
from tests.tiny import tiny_model

ASKED: dict[str, Any] = {
    "max_new_tokens": 6, "stop_ids": {1}, "temperature": 1.0, "seed": 3, "step": 2, "batch_size": 2
}  # fmt: skip
PROMPTS = [[5, 6], [7], [8, 9, 10]]


@pytest.fixture
def engine(tmp_path: Path) -> RolloutEngine:
    directory = tiny_model(tmp_path / "model", initializer_range=0.3)
    engine = RolloutEngine(directory, torch.float32, "cpu")
    sync_weights(SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)), engine)
    return engine


def failing(error: Exception) -> Any:
    def generate(*_: Any) -> None:
        raise error

    return generate


def test_the_same_responses_come_plainly_and_that_is_said_once(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fast = engine.generate(PROMPTS, [0, 1, 2], **ASKED)
    engine._decoder, engine._proven = None, False
    monkeypatch.setattr(SlotDecoder, "generate", failing(RuntimeError("no C compiler\nfound")))
    with caplog.at_level(logging.WARNING):
        first, second = (engine.generate(PROMPTS, [0, 1, 2], **ASKED) for _ in range(2))
    assert first.responses == second.responses == fast.responses
    [said] = [record.getMessage() for record in caplog.records if "plain loop" in record.getMessage()]
    assert "RuntimeError: no C compiler found" in said


@pytest.mark.parametrize("error", [NonFiniteError("not finite"), torch.OutOfMemoryError("none left")], ids=["values", "memory"])
def test_what_the_plain_loop_would_not_mend_is_raised(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(SlotDecoder, "generate", failing(error))
    with pytest.raises(type(error)):
        engine.generate(PROMPTS, [0, 1, 2], **ASKED)


def test_what_worked_once_is_not_given_up(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.generate(PROMPTS, [0, 1, 2], **ASKED)
    monkeypatch.setattr(SlotDecoder, "generate", failing(RuntimeError("later")))
    with pytest.raises(RuntimeError, match="later"):
        engine.generate(PROMPTS, [0, 1, 2], **ASKED)
