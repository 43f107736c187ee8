import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rl_core.errors import ConfigError, NonFiniteError
from rl_core.rollout.engine import RolloutEngine, stop_ids
from rl_core.rollout.sync import sync_weights
from tests.tiny import tiny_model

VOCABULARY = 60
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [20, 21, 22, 23, 24], [30, 31], [12], [40, 41, 42, 43, 44, 45]]
INDEX = [3, 10, 2, 7, 100, 11, 0]
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "step": 1, "batch_size": 8}


def build(family: str, directory: Path) -> Path:
    """A tiny model whose logits differ enough that rounding cannot change a greedy choice."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    shape: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "llama":
        return tiny_model(directory, initializer_range=0.3)
    if family == "gpt2":
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **common)).save_pretrained(directory)
    else:
        Qwen2ForCausalLM(Qwen2Config(**shape, **common)).save_pretrained(directory)
    return directory


def synced(directory: Path):
    """A policy and an engine with its weights."""
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    engine = RolloutEngine(directory, torch.float32, "cpu")
    sync_weights(SimpleNamespace(model=policy), engine)
    return policy, engine


@pytest.fixture(scope="module", params=["llama", "gpt2", "qwen2"])
def pair(request, tmp_path_factory):
    return synced(build(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return synced(build("llama", tmp_path_factory.mktemp("llama")))


def alone(policy, prompt, limit, stops):
    """transformers' own greedy response to one unpadded prompt."""
    made = policy.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=limit, eos_token_id=sorted(stops) or None, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_equals_transformers_generate(pair, batch_size):
    policy, engine = pair
    free = [alone(policy, prompt, 12, set()) for prompt in PROMPTS]
    stops = {free[0][4], free[3][2]}  # so that some rows end early
    made = engine.generate(PROMPTS, INDEX, stop_ids=stops, **SETTINGS | {"temperature": 0.0, "batch_size": batch_size})
    expected = [alone(policy, prompt, 12, stops) for prompt in PROMPTS]
    assert min(map(len, expected)) < 12
    assert made.responses == expected
    assert made.sample_index.tolist() == INDEX
    assert made.prompt_length.tolist() == [len(prompt) for prompt in PROMPTS]
    assert [row[: len(prompt)] for row, prompt in zip(made.input_ids.tolist(), PROMPTS, strict=True)] == PROMPTS


def test_draws_do_not_depend_on_the_batch(pair):
    _, engine = pair
    one, eight = (engine.generate(PROMPTS, INDEX, stop_ids={1, 2}, **SETTINGS | {"batch_size": size}) for size in (1, 8))
    assert one.responses == eight.responses
    assert torch.allclose(one.logprobs, eight.logprobs, atol=1e-5)
    backwards = engine.generate(PROMPTS[::-1], INDEX[::-1], stop_ids={1, 2}, **SETTINGS)
    assert backwards.responses[::-1] == eight.responses
    assert eight.responses[1] != eight.responses[5]  # the same prompt with another sample index


def test_seed_and_step_change_the_draws(llama):
    _, engine = llama
    drawn = [
        engine.generate(PROMPTS, INDEX, stop_ids=set(), **SETTINGS | changed).responses
        for changed in ({}, {}, {"seed": 6}, {"step": 2})
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] != drawn[3] != drawn[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward(pair, temperature):
    policy, engine = pair
    made = engine.generate(PROMPTS, INDEX, stop_ids={1, 2}, **SETTINGS | {"temperature": temperature})
    for row, (prompt, response) in enumerate(zip(PROMPTS, made.responses, strict=True)):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + response])).logits[0]
        whole = (logits / temperature).log_softmax(-1)
        expected = [whole[len(prompt) - 1 + t, token].item() for t, token in enumerate(response)]
        assert made.logprobs[row, : len(response)].tolist() == pytest.approx(expected, abs=1e-4)
        assert not made.logprobs[row, len(response) :].any()


def test_end_tokens_and_truncation(llama):
    policy, engine = llama
    free = alone(policy, PROMPTS[0], 12, set())
    greedy = SETTINGS | {"temperature": 0.0}
    for stop in set(free):  # any of several ids ends the response, at its first occurrence, and counts
        made = engine.generate(PROMPTS[:1], [0], stop_ids={stop, 3}, **greedy)
        length = made.response_length.item()
        assert made.responses[0] == free[:length]
        assert made.responses[0][-1] in {stop, 3}
        assert length == 1 + min(free.index(token) for token in {stop, 3} & set(free))
        assert made.truncated.tolist() == [False]
    made = engine.generate(PROMPTS[:1], [0], stop_ids={max(set(range(101)) - set(free))}, **greedy)  # one that does not occur
    assert made.responses == [free]
    assert made.truncated.tolist() == [True]
    # An end token as the very last one allowed: whole, not truncated.
    made = engine.generate(PROMPTS[:1], [0], stop_ids={free[0]}, **greedy | {"max_new_tokens": 1})
    assert made.response_length.tolist() == [1]
    assert made.truncated.tolist() == [False]


def test_no_prompts(llama):
    made = llama[1].generate([], [], stop_ids={1}, **SETTINGS)
    assert len(made) == 0


def test_batch_can_take_part_in_autograd(llama):
    made = llama[1].generate(PROMPTS, INDEX, stop_ids={1}, **SETTINGS)
    weight = torch.ones(1, requires_grad=True)
    (weight * made.logprobs).sum().backward()
    assert weight.grad is not None


def test_too_long(pair):
    _, engine = pair
    with pytest.raises(ConfigError, match=r"rollout.max_new_tokens is 300 and the longest prompt of the batch has 7"):
        engine.generate(PROMPTS, INDEX, stop_ids={1}, **SETTINGS | {"max_new_tokens": 300})


def test_weights_that_are_not_finite(tmp_path):
    directory = tiny_model(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        policy.model.norm.weight[0] = math.nan
    engine = RolloutEngine(directory, torch.float32, "cpu")
    sync_weights(SimpleNamespace(model=policy), engine)
    with pytest.raises(NonFiniteError, match="step 1"):
        engine.generate(PROMPTS, INDEX, stop_ids={1}, **SETTINGS)


def test_an_engine_without_weights_refuses(tmp_path):
    with pytest.raises(AssertionError, match="sync_weights"):
        RolloutEngine(tiny_model(tmp_path), torch.float32, "cpu").generate([[5]], [0], stop_ids={1}, **SETTINGS)


def test_stop_ids():
    tokenizer, config = SimpleNamespace(eos_token_id=4), SimpleNamespace(eos_token_id=2)
    assert stop_ids(tokenizer, SimpleNamespace(eos_token_id=[4, 7]), config) == {2, 4, 7}
    assert stop_ids(SimpleNamespace(eos_token_id=None), None, SimpleNamespace()) == set()
