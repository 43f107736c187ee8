"""The fast path on a GPU against a plain forward of the same weights. Nothing of this runs where there is none."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STOPS = set(range(2, 40))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    Qwen2Config(
        vocab_size=5000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.05,
    ).save_pretrained(path)  # fmt: skip
    return path


def policy(directory: Path, seed: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config.from_pretrained(directory)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().eval()


def asked(count: int, seed: int = 0) -> dict[str, Any]:
    """Prompts of 1 … 200 tokens, some of them equal, and limits of 1 … 120 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    prompts = [numbers(40, 5000, length) for length in numbers(1, 200, count)]
    prompts[3] = prompts[9] = prompts[-1]
    return {"prompt_ids": prompts, "sample_index": list(range(count)), "max_new_tokens": numbers(1, 120, count)}


def expected(model: Any, made: Any, temperature: float) -> torch.Tensor:
    """[B, R] log-probabilities of the responses by a forward of each row alone."""
    result = torch.zeros_like(made.logprobs)
    for row, (prompt, response) in enumerate(zip(made.prompts, made.responses, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response], device="cuda")).logits[0].float() / temperature
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        result[row, : len(response)] = scores.gather(1, torch.tensor(response, device="cuda")[:, None])[:, 0]
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_row_is_what_a_forward_of_it_alone_gives(directory: Path, dtype: torch.dtype) -> None:
    """Ragged prompts and limits, end tokens, refilled slots, several sizes of graph; after each of two syncs of weights."""
    engine = RolloutEngine(directory, dtype, "cuda")
    addresses = {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}
    for seed in (1, 2):
        model = policy(directory, seed, dtype)
        sync_weights(SimpleNamespace(model=model), engine)
        for temperature, concurrency in ((1.0, 64), (0.7, 20), (0.0, 64)):
            given = asked(150, seed)
            made = engine.generate(**given, temperature=temperature, seed=seed, step=3, stop_ids=STOPS, batch_size=concurrency)
            assert engine._decoder is not None
            lengths, limits = made.response_length.cpu(), torch.tensor(given["max_new_tokens"])
            assert (lengths <= limits).all()
            assert (made.truncated.cpu() | (lengths <= limits)).all()
            for response, truncated in zip(made.responses, made.truncated.tolist(), strict=True):
                assert not STOPS & set(response[:-1])
                assert (response[-1] not in STOPS) == truncated
            exact = expected(copy.deepcopy(model).float(), made, temperature or 1.0)
            usual = (expected(model, made, temperature or 1.0) - exact)[made.mask].abs()
            error = (made.logprobs - exact)[made.mask].abs()
            print(f"{dtype} {seed} {temperature} {concurrency}: error {error.mean():.5f} {error.max():.4f}", end=" ")
            print(f"plain forward {usual.mean():.5f} {usual.max():.4f}, {lengths.sum()} tokens")
            assert error.mean() < 1.3 * usual.mean() + 1e-4
            assert error.max() < 2 * usual.max() + 2e-3
    assert {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()} == addresses


def test_draws_are_those_of_the_host(directory: Path) -> None:
    """The kernels' tokens in float32 logits equal those of `sampling.draw` on the CPU."""
    from rl_core.rollout import kernels, sampling

    torch.manual_seed(0)
    logits = torch.randn(40, 151936) * 3
    keys, position = sampling.row_keys(7, 2, torch.arange(40)), torch.arange(40) * 5
    for temperature in (None, 0.7):
        tokens, logprobs = sampling.draw(logits, keys, position, temperature)
        scale = torch.tensor(temperature or 1.0, device="cuda")
        chunks = kernels.draw_chunks(logits.cuda(), keys.cuda(), position.cuda(), scale, temperature is None)
        drawn, scores, finite = kernels.draw_of(*chunks)
        assert drawn.tolist() == tokens.tolist()
        torch.testing.assert_close(scores.cpu(), logprobs, atol=1e-4, rtol=0)
        assert finite.all()
    logits[3, 151935] = torch.inf
    assert kernels.draw_of(*kernels.draw_chunks(logits.cuda(), keys.cuda(), position.cuda(), scale, False))[2].tolist() == [
        row != 3 for row in range(40)
    ]


def test_memory_is_given_back_and_taken_again(directory: Path) -> None:
    engine = RolloutEngine(directory, torch.bfloat16, "cuda")
    sync_weights(SimpleNamespace(model=policy(directory, 1, torch.bfloat16)), engine)
    given = asked(64) | {"temperature": 1.0, "seed": 0, "step": 0, "stop_ids": STOPS, "batch_size": 32}
    before = torch.cuda.memory_allocated()
    first = engine.generate(**given)
    assert torch.cuda.memory_allocated() > before + 2 * 4 * 32 * 256 * 2 * 64
    engine.release()
    second = engine.generate(**given)
    assert first.responses == second.responses
