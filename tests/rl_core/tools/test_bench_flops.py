"""The FLOPs of a step against torch's own counter of the products that are really made, and against sums by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config.model import ModelConfig
from rl_core.tools.bench_flops import Geometry, flops, geometry, matmul_speed
from tests.tiny import tiny_model

PROMPT, RESPONSE, ROWS = 7, 5, 3
TOY = Geometry(backbone=1000, head=100, layers=2, width=8)


def counted(model: Any, backward: bool) -> int:
    """FLOPs of the matrix products in a forward (and backward) of whole sequences, every position through the head."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.long)).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("settings", [{}, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}])
def test_forward_and_update_take_the_products_that_torch_counts(tmp_path: Path, settings: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model(tmp_path, tie=False, **settings)
    shape = geometry(tmp_path, ModelConfig(name_or_path=str(tmp_path)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    found = flops(shape, ROWS, 1, PROMPT, RESPONSE, epochs=1)
    elsewhere = 2 * shape.head * PROMPT * ROWS  # prompts do not pass through ppoflow's head
    assert found["old_log_prob"] == counted(model, backward=False) - elsewhere
    assert found["update_actor"] == counted(model, backward=True) - 3 * elsewhere


def test_phases_of_a_step() -> None:
    found = flops(TOY, prompts=2, n=3, prompt=4, response=6, epochs=5)
    whole, headed = 2 * 1000 * 10, 2 * 100 * 6
    attention = 4 * 2 * 8 * 10 * 10
    assert found["ref"] == found["old_log_prob"] == 6 * (whole + headed + attention)
    assert found["values"] == 6 * (whole + attention)
    assert found["update_actor"] == 5 * 6 * 3 * (whole + headed + attention)
    assert found["update_critic"] == 5 * 6 * 3 * (whole + attention)
    read = 4 * 2 * 8 * (4 * 4 + 6 * (4 + 3))  # a response token reads the prompt and on average half of the response
    assert found["gen"] == 6 * (whole + headed + read)
    assert found["greedy"] == found["gen"] / 3


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    adapted = Geometry(backbone=1000, head=100, layers=2, width=8, adapters=50)
    found = flops(adapted, prompts=1, n=1, prompt=4, response=6, epochs=1)
    assert found["update_actor"] == 2 * (2 * 1000 * 10 + 2 * 100 * 6) + 6 * 50 * 10 + 3 * 4 * 2 * 8 * 100
    assert found["update_critic"] == flops(TOY, 1, 1, 4, 6, 1)["update_critic"]


def test_of_a_mixture_of_experts_those_count_that_a_token_passes_through(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    hidden, inner, layers, width, groups = 32, 16, 2, 4 * 8, 2 * 8
    Qwen3MoeConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=64, moe_intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = geometry(tmp_path, ModelConfig(name_or_path=str(tmp_path)))
    attention = 2 * hidden * width + 2 * hidden * groups
    experts, router = 2 * 3 * hidden * inner, 8 * hidden
    assert shape.backbone == layers * (attention + experts + router)
    assert (shape.head, shape.layers, shape.width) == (64 * hidden, layers, width)


def test_the_speed_of_products_is_that_of_products() -> None:
    """A machine does at least 10 MFLOP/s and at most 100 TFLOP/s on its CPU: the units are right."""
    assert 1e7 < matmul_speed(torch.float32, torch.device("cpu")) < 1e14
