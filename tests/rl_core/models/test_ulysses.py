"""Sequence parallelism on 2 and 4 real ranks: scores and all gradients against plain transformers models in float64."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rl_core.errors import ConfigError
from rl_core.groups import Group, make_groups
from rl_core.models import ulysses
from rl_core.models.policy import PolicyModel
from rl_core.models.value import ValueModel
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config

TEMPERATURE = 0.7
SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3}
LAYERS = SIZES | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
WINDOW = {"sliding_window": 3}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Class prefix and settings; rows of the tests are 9 long, so that windows matter and GPT-2 has no position to spare.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LAYERS),
    "llama-one-group": ("Llama", LAYERS | {"num_key_value_heads": 1, "attn_implementation": "eager"}),
    "qwen2": ("Qwen2", LAYERS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", LAYERS | {"head_dim": 8}),
    "mistral": ("Mistral", LAYERS | WINDOW),
    "gemma2-softcap": ("Gemma2", LAYERS | MIXED | {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3", LAYERS | MIXED),
    "gpt2": ("GPT2", SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 9}),
    "deepseek-v2": ("DeepseekV2", LAYERS | LATENT),
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights on all ranks and in all types."""
    import transformers

    name, settings = FAMILIES[family]
    configuration = getattr(transformers, name + {"Gemma3": "TextConfig"}.get(name, "Config"))(
        **{"attn_implementation": "sdpa"} | settings
    )
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, name + head)(configuration).eval().to(dtype)


Batch = tuple[Tensor, Tensor, Tensor, int]


def batch(prompts: list[int], responses: list[int], width: int | None = None) -> Batch:
    prompt, response = torch.tensor(prompts), torch.tensor(responses)
    ids = torch.randint(2, 50, (len(prompts), int((prompt + response).max())), generator=torch.Generator().manual_seed(1))
    return ids, prompt, response, max(responses) if width is None else width


RAGGED = batch([3, 7, 1, 5], [4, 2, 6, 0])
EDGES = {
    "a slice with pads only": batch([1, 2], [2, 0]),
    "fewer tokens than ranks": batch([1], [1]),
    "responses in one slice": batch([1, 2, 1], [2, 1, 0], width=8),
    "no response": batch([9, 2], [0, 0], width=3),
    "dummy": batch([1], [0], width=0),
}
Result = dict[str, Tensor]


def objective(logprobs: Tensor, entropy: Tensor, values: Tensor) -> Tensor:
    """Something that is not linear in the scores and treats no two tokens alike."""
    weights = torch.linspace(0.5, 2.0, logprobs.shape[1] + 1)[:-1] * torch.arange(1, len(logprobs) + 1)[:, None]
    return (weights * (logprobs.square() + entropy + torch.tanh(values))).sum()


def critic_of(family: str, group: Group | None, dtype: torch.dtype = torch.float32) -> ValueModel:
    """The same on all ranks; its head is not zero, so that gradients reach the backbone."""
    causal = model_of(family, dtype)
    if group is not None:
        ulysses.enable(causal, group.sequence_group)
    critic = ValueModel(causal.base_model, group)
    critic.value_head.to_empty(device="cpu")
    with torch.no_grad():
        critic.value_head.weight.copy_(torch.linspace(-1, 1, 32)[None])
        critic.value_head.bias.fill_(0.1)
    return critic


def policy_of(family: str, group: Group | None) -> PolicyModel:
    causal = model_of(family)
    if group is not None:
        ulysses.enable(causal, group.sequence_group)
    return PolicyModel(causal, group)


def scored(policy: nn.Module, critic: nn.Module, rows: Batch, factor: int = 1) -> Result:
    """Scores, and gradients of the objective left in both models."""
    logprobs, entropy = policy(*rows, TEMPERATURE, entropy=True, entropy_gradient=True)
    values = critic(*rows)
    (objective(logprobs, entropy, values) * factor).backward()
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "values": values.detach()}


def gradients(policy: nn.Module, critic: nn.Module, read: Callable[[Tensor], Tensor]) -> Result:
    named = [*policy.named_parameters(), *critic.named_parameters()]
    return {name.replace("_checkpoint_wrapped_module.", ""): read(parameter) for name, parameter in named}


def expected(family: str, rows: Batch) -> tuple[Result, Result]:
    """Scores and gradients of plain transformers models in float64, row by row and without padding."""
    ids, prompt, response, width = rows
    causal, critic = model_of(family, torch.float64), critic_of(family, None, torch.float64)
    critic.value_head.double()
    for model in (causal, critic.backbone):
        model.config._attn_implementation = model.config._experts_implementation = "eager"
    scores: dict[str, list[Tensor]] = {"logprobs": [], "entropy": [], "values": []}
    for row, start, length in zip(ids, prompt.tolist(), response.tolist(), strict=True):
        tokens, chosen = row[None, : start + length], slice(start - 1, start + length - 1)
        distribution = (causal(tokens).logits[0, chosen] / TEMPERATURE).log_softmax(-1)
        states = critic.backbone(tokens).last_hidden_state[0, chosen]
        for name, score in (
            ("logprobs", distribution[torch.arange(length), row[start : start + length]]),
            ("entropy", -(distribution.exp() * distribution).sum(-1)),
            ("values", critic.value_head(states)[:, 0]),
        ):
            scores[name].append(nn.functional.pad(score, (0, width - length)))
    full = {name: torch.stack(each) for name, each in scores.items()}
    objective(**full).backward()
    policy = PolicyModel(causal)
    return {name: score.detach() for name, score in full.items()}, gradients(policy, critic, _gradient)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _summed(parameter: Tensor) -> Tensor:
    total = _gradient(parameter).clone()
    dist.all_reduce(total)
    return total


def assert_equal(actual: Result, wanted: Result, tolerance: float) -> None:
    """Within `tolerance` of a tensor's largest element, where that is not mere rounding beside the others'."""
    assert actual.keys() == wanted.keys()
    largest = {name: float(tensor.abs().max()) if tensor.numel() else 0.0 for name, tensor in wanted.items()}
    floor = max(largest.values()) / 100
    for name, tensor in wanted.items():
        atol = tolerance * max(largest[name], floor)
        torch.testing.assert_close(actual[name].double(), tensor, rtol=0, atol=atol, msg=lambda text, of=name: f"{of}: {text}")


def group_of(sequence: int) -> Group:
    return make_groups(config(fsdp={"ulysses_sequence_parallel_size": sequence}), ["actor"], "cpu")["actor"]


def on_slices(rank: int) -> dict[str, tuple[Result, Result]]:
    """Each family on rows shared by all ranks, unsharded: scores, and gradients summed over the ranks."""
    group, done = group_of(dist.get_world_size()), {}
    for name, family, rows in [(name, name, RAGGED) for name in FAMILIES] + [(name, "llama", EDGES[name]) for name in EDGES]:
        policy, critic = policy_of(family, group), critic_of(family, group)
        scores = scored(policy, critic, rows)
        done[name] = scores, gradients(policy, critic, _summed)
    return done


LOW = "bfloat16"


def on_shards(rank: int) -> dict[str, tuple[Result, Result]]:
    """Half of the rows on each pair of ranks, parameters sharded over all four: plainly, recomputing, in low precision."""
    group, done = group_of(2), {}
    ids, prompt, response = (tensor[group.part :: 2] for tensor in RAGGED[:3])
    for name, dtype in (("plain", None), ("recomputing", None), (LOW, torch.bfloat16)):
        policy, critic = policy_of("mistral", group), critic_of("mistral", group)
        wrap = partial(fully_shard, mesh=group.mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
        for layers in (policy.model.model.layers, critic.backbone.layers):
            for index, layer in enumerate(layers):
                layers[index] = layer if name == "plain" else checkpoint_wrapper(layer, preserve_rng_state=False)
                wrap(layers[index])
        fully_shard(critic.value_head, mesh=group.mesh)  # computes in float32 always
        wrap(policy)
        wrap(critic)
        # FSDP averages over all ranks: the factor makes a sum of that, as the Learner does.
        scores = scored(policy, critic, (ids, prompt, response, RAGGED[3]), factor=group.size)
        done[name] = scores, gradients(policy, critic, lambda parameter: parameter.grad.full_tensor())
    return done


class OwnAttention(nn.Module):
    """Attention that asks no interface."""


class OwnModel(PreTrainedModel):
    """A user's model, so far as it matters here."""

    config_class = LlamaConfig
    base_model_prefix = "model"

    def __init__(self, settings: LlamaConfig) -> None:
        super().__init__(settings)
        self.attention = OwnAttention()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return input_ids


class ClaimingModel(OwnModel):
    _supports_attention_backend = _supports_sdpa = True


def refused_models() -> dict[str, Any]:
    import transformers

    def llama(**changes: Any) -> LlamaConfig:
        return LlamaConfig(**LAYERS | changes)

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sinks = transformers.GptOssConfig(**LAYERS, num_local_experts=2, num_experts_per_tok=1, head_dim=8)
    conv = transformers.Lfm2Config(**LAYERS | {"layer_types": ["conv", "full_attention"]})
    with torch.device("meta"):
        models = {
            "heads": LlamaForCausalLM(llama(hidden_size=36, num_attention_heads=9, num_key_value_heads=9)),
            "kernel": LlamaForCausalLM(llama()),
            "own": OwnModel(llama()),
            "claiming": ClaimingModel(llama()),
            "bloom": transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)),
            "conv": transformers.Lfm2ForCausalLM(conv),
            "sinks": transformers.GptOssForCausalLM(sinks),
            "rope": LlamaForCausalLM(llama(rope_parameters=dynamic)),
        }
    models["kernel"].config._attn_implementation = "flash_attention_2"
    return models


REFUSALS = {
    "heads": r"fsdp.ulysses_sequence_parallel_size = 2 does not divide the 9 attention heads.* Valid values: 1, 3, 9\.",
    "kernel": r"goes with model.attn_implementation = sdpa or eager for LlamaForCausalLM, not flash_attention_2",
    "own": r"AttentionInterface.*OwnModel is none. Set it to 1.*_supports_attention_backend = True",
    "claiming": r"AttentionInterface.*ClaimingModel is none",
    "bloom": r"AttentionInterface.*BloomForCausalLM is none",
    "conv": r"Lfm2ForCausalLM has layers other than causal attention \(conv\)",
    "sinks": r"attention sinks",
    "rope": r"rope_type dynamic.*Set it to 1",
}


def refusals(rank: int) -> dict[str, str]:
    messages = {}
    for name, model in refused_models().items():
        with pytest.raises(ConfigError) as raised:
            ulysses.enable(model, dist.group.WORLD)
        messages[name] = str(raised.value)
    return messages


def masks(rank: int) -> dict[str, list[Any]]:
    """Shapes of the masks that the attention layers are called with."""
    seen: dict[str, list[Any]] = {"llama": [], "gemma3": []}
    group = group_of(dist.get_world_size())
    for family, shapes in seen.items():
        policy = policy_of(family, group)
        for layer in policy.model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, shapes=shapes: shapes.append(getattr(kwargs["attention_mask"], "shape", None)),
                with_kwargs=True,
            )
        policy(*RAGGED, TEMPERATURE, False)
    return seen


def on_two(rank: int) -> tuple[Any, ...]:
    return on_slices(rank), refusals(rank), masks(rank)


def on_four(rank: int) -> tuple[Any, ...]:
    return on_slices(rank), on_shards(rank)


@pytest.fixture(scope="module")
def two() -> list[tuple[Any, ...]]:
    return run_ranks(on_two, 2)


@pytest.fixture(scope="module")
def four() -> list[tuple[Any, ...]]:
    return run_ranks(on_four, 4)


@pytest.mark.parametrize("name", [*FAMILIES, *EDGES])
def test_scores_and_gradients_are_those_of_whole_rows(name: str, two: Any, four: Any) -> None:
    scores, grads = expected(name, RAGGED) if name in FAMILIES else expected("llama", EDGES[name])
    assert name in EDGES or all(gradient.any() for gradient in grads.values())
    for slices, *_ in (*two, *four):
        assert_equal(slices[name][0], scores, 1e-5)
        assert_equal(slices[name][1], grads, 1e-4)


def test_with_data_parallel_and_sharding_too(four: Any) -> None:
    ids, prompt, response, width = RAGGED
    parts = [expected("mistral", (ids[part::2], prompt[part::2], response[part::2], width)) for part in (0, 1)]
    grads = {name: parts[0][1][name] + gradient for name, gradient in parts[1][1].items()}
    for rank, (_, shards) in enumerate(four):
        for name in ("plain", "recomputing"):
            assert_equal(shards[name][0], parts[rank // 2][0], 1e-5)
            assert_equal(shards[name][1], grads, 1e-4)
        assert_equal(shards[LOW][0], parts[rank // 2][0], 0.1)
        for name, gradient in grads.items():
            similarity = torch.cosine_similarity(shards[LOW][1][name].flatten().double(), gradient.flatten(), dim=0)
            assert similarity > 0.98, name


def test_only_windows_make_masks(two: Any) -> None:
    for *_, seen in two:
        assert seen["llama"] == [None, None]  # SDPA is causal by itself and may take its fast kernels
        assert [shape and tuple(shape[-2:]) for shape in seen["gemma3"]] == [(10, 10), None]  # 9 positions and a pad


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_divided_is_refused(name: str, two: Any) -> None:
    for _, messages, _ in two:
        assert re.search(REFUSALS[name], messages[name]), messages[name]
