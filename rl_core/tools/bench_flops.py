"""How much arithmetic a PPO step takes, and how fast this device multiplies: what model FLOP utilization (MFU) is made of.

    MFU = FLOPs of the step / (seconds × ranks × measured FLOP/s of one rank's matrix products)

FLOPs are counted as in Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): 2 for each matrix parameter and token in a
forward pass, twice that in its backward, and 12 · layers · heads · head size · length for each token that attends to the whole
sequence, a third of it forward. Response tokens alone pass through the head to the vocabulary; the critic has none. A frozen
weight under adapters has no gradient of its own: its backward costs as much as its forward. Not counted are what activation
checkpointing computes again, padding, and a reward model. Of a mixture of experts those count that a token passes through.
Layers that attend to a window or not at all are counted as if they attended to everything.

The denominator is measured in the same processes, before the models are built: the best of several products of two large square
matrices in the type that the actor computes in.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_core.config.model import ModelConfig
from rl_core.models.build import empty_model

FORMULA = (
    "MFU = FLOPs / (seconds × ranks × measured matmul FLOP/s of a rank); FLOPs = 2N a token forward, 6N trained (N: matrix "
    "parameters, the head's for response tokens only), and 4·layers·heads·head size·length a token for attention, ×3 trained"
)
TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What FLOPs follow from."""

    backbone: int
    """Matrix parameters that each token passes through, head and embedding apart."""
    head: int
    """Parameters of the head to the vocabulary."""
    layers: int
    width: int
    """Heads × head size."""
    adapters: int = 0
    """Parameters of the actor's adapters; 0: all its weights are trained."""
    critic_adapters: int = 0


def geometry(directory: Path, settings: ModelConfig, adapters: int = 0, critic_adapters: int = 0) -> Geometry:
    """Of the model that config.json in `directory` describes."""
    causal = empty_model(directory, settings)
    text = causal.config.get_text_config()
    heads = text.num_attention_heads
    return Geometry(
        backbone=sum(_passed(name, parameter, text) for name, parameter in _matrices(causal.base_model)),
        head=causal.get_output_embeddings().weight.numel(),  # type: ignore[operator, union-attr]
        layers=text.num_hidden_layers,
        width=heads * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        adapters=adapters,
        critic_adapters=critic_adapters,
    )


def _matrices(backbone: nn.Module) -> list[tuple[str, nn.Parameter]]:
    lookups = {id(module.weight) for module in backbone.modules() if isinstance(module, nn.Embedding)}
    return [(name, value) for name, value in backbone.named_parameters() if value.dim() > 1 and id(value) not in lookups]


def _passed(name: str, parameter: nn.Parameter, text: Any) -> int:
    """Parameters of a matrix that one token passes through."""
    experts = [getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    total = next((count for count in experts if count), None)
    if total is None or ".experts." not in f".{name}":
        return parameter.numel()
    return parameter.numel() * text.num_experts_per_tok // total


def flops(shape: Geometry, prompts: int, n: int, prompt: int, response: int, epochs: int) -> dict[str, float]:
    """FLOPs of the phases of a step, by the names of their timers.

    Args:
        prompts: of a step.
        n: responses to each.
        prompt, response: tokens of each.
        epochs: passes of the updates over the responses.
    """
    length, rows = prompt + response, prompts * n
    attention = 4.0 * shape.layers * shape.width * length * length
    critic = 2.0 * shape.backbone * length
    actor = critic + 2.0 * shape.head * response
    read = prompt * prompt + response * (prompt + response / 2)  # a token sees those before it
    generated = actor + 4.0 * shape.layers * shape.width * read
    return {
        "gen": rows * generated,
        "greedy": prompts * generated,
        "old_log_prob": rows * (actor + attention),
        "ref": rows * (actor + attention),
        "values": rows * (critic + attention),
        "update_actor": epochs * rows * (_trained(actor, shape.adapters, length) + 3 * attention),
        "update_critic": epochs * rows * (_trained(critic, shape.critic_adapters, length) + 3 * attention),
    }


def _trained(forward: float, adapters: int, length: int) -> float:
    return 2 * forward + 6.0 * adapters * length if adapters else 3 * forward


def matmul_speed(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of this rank's device in matrix products, the best of several tries (of a few milliseconds each on a GPU)."""
    on_gpu = device.type == "cuda"
    size, times = (8192, 8) if on_gpu else (1024, 1)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(TRIES):
        _wait(on_gpu)
        start = time.perf_counter()
        for _ in range(times):
            left @ right
        _wait(on_gpu)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 * times / best


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
