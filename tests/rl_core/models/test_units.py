"""Which modules become FSDP units or are recomputed, what is refused, and what becomes of buffers; without ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from rl_core.config.fsdp import FsdpConfig, WrapPolicyConfig
from rl_core.errors import ConfigError
from rl_core.models import sharding
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import settle_buffers, shard, unit_classes
from tests.rl_core.models.sharded import llama


def test_what_is_not_sharded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "fully_shard", lambda *_, **__: None)

    class Mesh:
        device_type, ndim = "cpu", 1

        def size(self, _: int = 0) -> int:
            return 2

    with pytest.raises(AssertionError, match="is not sharded"):
        shard(PolicyModel(llama()), {"LlamaDecoderLayer"}, FsdpConfig(), torch.float32, Mesh())  # type: ignore[arg-type]


def wrapped(model: nn.Module, **policy: Any) -> Counter[str]:
    """Class names of the units beside the root."""
    settings = WrapPolicyConfig(**policy)
    inner = model.model if isinstance(model, PolicyModel) else model
    return Counter(type(unit).__name__ for unit in sharding._units(model, unit_classes(inner, settings), settings))


def test_which_modules_become_units() -> None:
    with torch.device("meta"):
        tied, untied = (PolicyModel(llama(tie)) for tie in (True, False))
    layers, halves = {"LlamaDecoderLayer": 2}, {"LlamaAttention": 2, "LlamaMLP": 2}
    assert wrapped(tied) == wrapped(untied) == layers
    assert wrapped(tied, transformer_layer_cls_to_wrap="LlamaAttention, LlamaMLP") == halves
    # 3,264 parameters of the embeddings (+ 32 of the last norm), 3,072 of attention, 6,144 of the MLP: both keys count.
    assert wrapped(untied, min_num_params=3297) == layers | {"LlamaMLP": 2}
    assert wrapped(untied, min_num_params=3296) == layers | {"LlamaMLP": 2, "LlamaModel": 1}
    assert wrapped(untied, min_num_params=3264) == layers | {"LlamaMLP": 2, "Embedding": 1}
    assert wrapped(untied, min_num_params=3072) == layers | halves | {"Embedding": 1}
    # By size alone: what is left of the layers belongs to the backbone. The head never is a unit, nor what is tied to it.
    size = {"auto_wrap": "SIZE_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    assert wrapped(untied, **size, min_num_params=6144) == {"LlamaMLP": 2, "LlamaModel": 1}
    assert wrapped(tied, **size, min_num_params=3264) == {"LlamaMLP": 2}
    assert wrapped(untied, **size) == {}
    assert wrapped(untied, auto_wrap="NO_WRAP", min_num_params=1) == {}


class Expert(nn.Linear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(2))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


def test_experts_that_run_on_some_ranks_only_are_no_units() -> None:
    assert wrapped(Stack(), auto_wrap="SIZE_BASED_WRAP", min_num_params=1) == {"LayerNorm": 2, "Layer": 2}
    with pytest.raises(ConfigError, match="Expert shares its parameters or does not run once"):
        unit_classes(Stack(), WrapPolicyConfig(transformer_layer_cls_to_wrap=["Expert"]))


def test_wrong_classes_are_refused_with_those_that_exist() -> None:
    where = r"fsdp\.wrap_policy\.transformer_layer_cls_to_wrap: "
    with pytest.raises(ConfigError, match=where + r"Qwen2DecoderLayer does not occur in LlamaForCausalLM.*: LlamaDecoderLayer\."):
        unit_classes(llama(), WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen2DecoderLayer", "LlamaDecoderLayer"]))
    with pytest.raises(ConfigError, match=where + r"Stack does not say which of its layers to shard.*: Layer\."):
        unit_classes(Stack(), WrapPolicyConfig())
    assert unit_classes(Stack(), WrapPolicyConfig(min_num_params=1)) == set()
    assert unit_classes(Stack(), WrapPolicyConfig(auto_wrap="NO_WRAP")) == set()


def test_recomputation_needs_layers() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing.*nothing says what the layers of Linear are"):
        sharding._wrap_layers(nn.Linear(2, 2), set(), FsdpConfig(activation_checkpointing=True))


def test_buffers_get_their_type_and_stay_unsaved() -> None:
    model = llama()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    settle_buffers(model, FsdpConfig(mixed_precision={"buffer_dtype": "bf16"}), torch.device("cpu"))  # type: ignore[arg-type]
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.bfloat16
    torch.testing.assert_close(frequencies.float(), 10000.0 ** -(torch.arange(0, 8, 2) / 8), rtol=0.01, atol=0)
    assert model.count.dtype == torch.int64
    assert "model.rotary_emb.inv_freq" not in model.state_dict()
    settle_buffers(model, FsdpConfig(), torch.device("cpu"))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
