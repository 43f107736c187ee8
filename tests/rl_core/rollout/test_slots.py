"""Generation in slots: against the plain loop, row by row, in fewer steps."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.fuse import fuse_projections
from rl_core.rollout.plain import generate_plainly
from rl_core.rollout.requests import Requests
from rl_core.rollout.sync import sync_weights
from tests.rl_core.models.cases import family
from tests.tiny import tiny_model

COUNT = 17
GENERATOR = torch.Generator().manual_seed(4)


def numbers(low: int, high: int, size: int) -> list[int]:
    return torch.randint(low, high, (size,), generator=GENERATOR).tolist()


PROMPTS = [numbers(2, 100, length) for length in [1, 9, 4, 1, *numbers(1, 12, COUNT - 4)]]
PROMPTS[6] = PROMPTS[11] = PROMPTS[16] = PROMPTS[1]
LIMITS = numbers(1, 25, COUNT)
STOPS = [set(numbers(2, 100, 5)) for _ in range(COUNT)]
ASKED: dict[str, Any] = {"max_new_tokens": LIMITS, "stop_ids": STOPS, "temperature": 1.0, "seed": 3, "step": 2}


def engine_of(directory: Path, seed: int = 0) -> RolloutEngine:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = RolloutEngine(directory, torch.float32, "cpu")
    sync_weights(SimpleNamespace(model=model), engine)
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RolloutEngine:
    return engine_of(tiny_model(tmp_path_factory.mktemp("slots"), initializer_range=0.3))


def plainly(engine: RolloutEngine, **changed: Any) -> Any:
    settings = ASKED | {"top_k": 0, "top_p": 1.0} | changed
    requests = Requests(
        prompts=PROMPTS,
        numbers=list(range(COUNT)),
        limits=settings["max_new_tokens"],
        stops=[frozenset(ids) for ids in settings["stop_ids"]],
        **{name: settings[name] for name in ("temperature", "top_k", "top_p", "seed", "step")},
    )
    return generate_plainly(engine.model, requests, COUNT)


@pytest.mark.parametrize("concurrency", [1, 3, 6, 40])
@pytest.mark.parametrize("changed", [{}, {"temperature": 0.6, "top_k": 4, "top_p": 0.8}, {"temperature": 0.0}], ids=str)
def test_slots_give_what_the_plain_loop_gives(engine: RolloutEngine, concurrency: int, changed: dict[str, Any]) -> None:
    """Ragged prompts, limits and end tokens, equal prompts, refilled slots: the same batch in all its columns."""
    made = engine.generate(PROMPTS, list(range(COUNT)), batch_size=concurrency, **ASKED | changed)
    expected = plainly(engine, **changed)
    assert engine._decoder is not None
    assert len({*expected.response_length.tolist()}) > 4
    assert expected.truncated.any()
    assert not expected.truncated.all()
    for column in ("input_ids", "prompt_length", "response_length", "truncated", "sample_index"):
        assert torch.equal(getattr(made, column), getattr(expected, column)), column
    torch.testing.assert_close(made.logprobs, expected.logprobs, atol=2e-5, rtol=0)


def test_a_ragged_batch_costs_what_it_generates(engine: RolloutEngine) -> None:
    """Rows computed while decoding: those of the responses, and few for slots that wait; equal prompts are computed once."""
    decoded, packed = [], []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        rows, tokens = given["input_ids"].shape
        (decoded if tokens == 1 else packed).append(rows * tokens)

    assert engine._decoder_for(1) is not None  # which was found out by a forward
    prompts, limits = [[5, 6, 7, 8]] * 24, [2, 3, 4, 30, 2, 5] * 4
    hook = engine.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        made = engine.generate(
            prompts, list(range(24)), max_new_tokens=limits, stop_ids=set(), temperature=1.0, seed=0, step=0, batch_size=8
        )
    finally:
        hook.remove()
    assert made.response_length.tolist() == limits
    assert sum(packed) == 3  # of one prompt, all but its last token
    assert sum(limits) <= sum(decoded) <= 1.1 * sum(limits)


def test_slots_that_are_kept_hold_nothing_of_the_batch_before(engine: RolloutEngine) -> None:
    first = engine.generate(PROMPTS, list(range(COUNT)), batch_size=4, **ASKED)
    place = engine._decoder._keys.data_ptr()  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    second = engine.generate(PROMPTS, list(range(COUNT)), batch_size=4, **ASKED)
    assert engine._decoder._keys.data_ptr() == place  # type: ignore[union-attr]
    assert second.responses == plainly(engine).responses != first.responses
    engine.release()
    assert not engine._decoder._keys.numel()  # type: ignore[union-attr]
    assert engine.generate(PROMPTS, list(range(COUNT)), batch_size=4, **ASKED).responses == second.responses


def test_what_is_not_finite_leaves_nothing_behind(tmp_path: Path) -> None:
    from rl_core.errors import NonFiniteError

    engine = engine_of(tiny_model(tmp_path, initializer_range=0.3))
    weight = engine.model.get_input_embeddings().weight
    before = engine.generate(PROMPTS, list(range(COUNT)), batch_size=4, **ASKED).responses
    kept = weight.clone()
    weight[PROMPTS[2][0]] = torch.nan
    with pytest.raises(NonFiniteError, match="step 2, for sample 2 at response token 0"):
        engine.generate(PROMPTS[2:3], [2], batch_size=4, **ASKED | {"max_new_tokens": 3, "stop_ids": {1}})
    weight.copy_(kept)
    assert engine.generate(PROMPTS, list(range(COUNT)), batch_size=4, **ASKED).responses == before


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2"])
def test_families_that_are_served(name: str, tmp_path: Path) -> None:
    engine = engine_of(family(tmp_path, name))
    made = engine.generate(PROMPTS, list(range(COUNT)), batch_size=5, **ASKED)
    assert engine._decoder is not None
    assert made.responses == plainly(engine).responses


def test_a_family_that_is_not_served_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(family(tmp_path, "deepseek-v2"))
    with caplog.at_level(logging.WARNING, logger="rl_core"):
        for _ in range(2):
            made = engine.generate(PROMPTS, list(range(COUNT)), batch_size=COUNT, **ASKED)
    assert made.responses == plainly(engine).responses
    [said] = [record.getMessage() for record in caplog.records if "plain loop" in record.getMessage()]
    assert "DeepseekV2ForCausalLM" in said
    assert "its keys and values are not alike" in said


def test_a_sliding_window_is_left_to_the_plain_loop(tmp_path: Path) -> None:
    """The tiny Mistral sees four tokens: rows of no more than that go into slots."""
    engine = engine_of(family(tmp_path, "mistral"))
    made = engine.generate(PROMPTS, list(range(COUNT)), batch_size=COUNT, **ASKED)
    assert made.responses == plainly(engine).responses
    assert engine._decoder_for(4) is not None
    assert engine._decoder_for(5) is None


@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_projections_together_are_the_projections(name: str, tmp_path: Path) -> None:
    """Without and with biases; afterwards weights are filled by name as before."""
    directory = family(tmp_path, name)
    engine, together = engine_of(directory), RolloutEngine(directory, torch.float32, "cpu")
    assert fuse_projections(together.model) == 2 * engine.config.num_hidden_layers
    assert together.model.state_dict().keys() == engine.model.state_dict().keys()
    for _ in range(2):
        sync_weights(SimpleNamespace(model=engine.model), together)
        ids = torch.tensor([PROMPTS[1]])
        torch.testing.assert_close(together.model(ids).logits, engine.model(ids).logits, atol=2e-5, rtol=1e-5)
        assert (
            together.generate(PROMPTS, list(range(COUNT)), batch_size=5, **ASKED).responses
            == engine.generate(PROMPTS, list(range(COUNT)), batch_size=5, **ASKED).responses
        )
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.5)
