"""Bytes counted on the meta device are those of a run with values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from rl_core.config.fsdp import FsdpConfig
from rl_core.models.policy import PolicyModel
from rl_core.models.value import ValueModel
from rl_core.tools.plan_models import Model, Part, scoring_peak, sizes, update_trace
from rl_core.tools.plan_rollout import rollout_bytes
from rl_core.tools.plan_trace import LiveBytes, _attention, collect_gradients
from tests.rl_core.models.cases import family
from tests.tiny import tiny_model

ROWS, PROMPT, RESPONSE = 3, 5, 7


def part(directory: Path, valued: bool = False, lora: str | None = None, attention: str = "eager", **fsdp: Any) -> Part:
    settings = FsdpConfig(**fsdp).model_dump_json()
    return Part(Model(directory, attention=attention), valued, True, lora, settings, torch.float32)


def real(directory: Path, valued: bool) -> tuple[Any, tuple[Any, ...]]:
    """The same model with values, and a batch without padding."""
    import transformers

    causal = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    module = ValueModel(causal.base_model) if valued else PolicyModel(causal)
    if valued:
        module.value_head.to_empty(device="cpu")
    ids = torch.randint(2, 100, (ROWS, PROMPT + RESPONSE))
    lengths = torch.full((ROWS,), PROMPT), torch.full((ROWS,), RESPONSE)
    return module, (ids, *lengths, RESPONSE, *(() if valued else (1.0, True)))


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "gpt2"])
@pytest.mark.parametrize("valued", [False, True])
def test_a_forward_and_backward_holds_what_it_holds_with_values(tmp_path: Path, name: str, valued: bool) -> None:
    directory = family(tmp_path / "model", name)
    module, arguments = real(directory, valued)
    counter = LiveBytes(ignored=[*module.parameters(), *module.buffers()])
    collect_gradients(module, counter)
    with counter:
        batch = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
        result = module(*batch)
        kept = counter.live
        (result if valued else result[0]).sum().backward()
        after = counter.live
    trace = update_trace(part(directory, valued), ROWS, PROMPT, RESPONSE)
    length = arguments[1].nbytes  # the trace gives one tensor as both lengths
    assert trace.kept == pytest.approx(kept - length, rel=0.02)  # masks that depend on values are put together in another way
    assert max(live for _, live in trace.most) == pytest.approx(counter.peak - length, rel=0.02)
    assert trace.after == pytest.approx(after - length, abs=0.02 * kept)
    made = [made for made, _ in trace.most]
    assert made == sorted(counter.most)
    assert made[-1] <= sizes(part(directory, valued).keeping).all


def test_what_is_kept_is_what_autograd_saves(tmp_path: Path) -> None:
    """An independent count: the storages that autograd's hooks show, with those of the results."""
    directory = tiny_model(tmp_path / "model")
    module, arguments = real(directory, valued=True)
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(*arguments)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in [*saved.values(), result]}
    trace = update_trace(part(directory, valued=True), ROWS, PROMPT, RESPONSE)
    assert trace.kept == pytest.approx(sum(held.values()), rel=0.05)


def test_checkpointing_and_offload_keep_less(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    rows, prompt = 8, 250

    def kept(**fsdp: Any) -> int:
        return update_trace(part(directory, valued=True, **fsdp), rows, prompt, 6).kept

    state = rows * 256 * 256 * 4  # [B, T, hidden] float32
    recomputed = kept(activation_checkpointing=True)
    assert 6 * state <= recomputed < 10 * state  # of each layer its input; beside them what the last norm keeps
    assert kept() > 30 * state
    assert kept(activation_cpu_offload=True) < 4 * state
    assert kept(activation_cpu_offload=True, activation_checkpointing=True) < 4 * state


def test_entropy_in_the_loss_needs_more_logits(tmp_path: Path) -> None:
    wide = part(tiny_model(tmp_path / "model", vocab_size=20_000))
    logits = ROWS * RESPONSE * 20_000 * 4
    usual, charged = (dict(update_trace(wide, ROWS, PROMPT, RESPONSE, entropy).most)[0] for entropy in (False, True))
    assert charged > usual + 0.9 * logits
    assert usual >= 3 * logits  # as computed, as logarithms, and their gradient


def test_without_gradients_only_a_layer_at_a_time_is_held(tmp_path: Path) -> None:
    shallow = tiny_model(tmp_path / "shallow", num_hidden_layers=2)
    deep = tiny_model(tmp_path / "deep", num_hidden_layers=8)
    peaks = [scoring_peak(part(each, valued=True).frozen, ROWS, PROMPT, RESPONSE) for each in (shallow, deep)]
    assert peaks[0] == peaks[1]
    assert update_trace(part(deep, valued=True), ROWS, PROMPT, RESPONSE).kept > 3 * peaks[0]


def test_adapters_are_what_gets_gradients(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model")
    adapted = part(directory, lora='{"rank": 2, "target_modules": ["q_proj"]}')
    found = sizes(adapted.keeping)
    assert found.trained == 2 * 2 * (32 + 32)  # two layers, A and B of rank 2 over 32
    assert found.all == sizes(part(directory).keeping).all + found.trained
    assert found.adapted == 32 * 32
    assert update_trace(adapted, ROWS, PROMPT, RESPONSE).most[-1][0] <= found.trained


def test_units_and_root(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", tie=False)
    found = sizes(part(directory).keeping)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32  # q, o; k, v; three of the MLP; two norms
    outside = 2 * 102 * 32 + 32  # embedding, head, last norm
    assert (found.unit, found.root, found.all) == (layer, outside, 2 * layer + outside)
    one = sizes(replace(part(directory), fsdp=FsdpConfig(wrap_policy={"auto_wrap": "NO_WRAP"}).model_dump_json()).keeping)
    assert (one.unit, one.root) == (0, found.all)


def test_fused_attention_keeps_no_matrix() -> None:
    query = torch.empty(2, 4, 64, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key, value = (torch.empty(2, 2, 64, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    with LiveBytes(ignored=[query, key, value]) as counter:
        result, _ = _attention(module, query, key, value, None)
        plain = counter.live
        mask = torch.empty(2, 1, 64, 64, dtype=torch.bool, device="meta")
        before = counter.live
        masked, _ = _attention(module, query, key, value, mask)
        with_mask = counter.live - before
    output, sums = 2 * 64 * 4 * 8 * 2, 2 * 4 * 64 * 4
    assert result.shape == masked.shape == (2, 64, 4, 8)
    assert plain == output + sums
    assert with_mask == output + sums + 2 * output + 2 * 64 * 64 * 2  # keys and values of all heads; the mask as numbers


def test_rollout_in_slots_and_plainly(tmp_path: Path) -> None:
    slots = rollout_bytes(Model(tiny_model(tmp_path / "model")), torch.bfloat16, ROWS, PROMPT, RESPONSE)
    assert slots.cache == slots.stays == 2 * 2 * 8 * 64 * 2 * 8 * 2  # keys and values, layers, 8 slots of 64 places, heads, width
    sighted = Model(family(tmp_path / "mistral", "mistral"))  # it sees 4 tokens, which the slots do not know of
    plain = rollout_bytes(sighted, torch.bfloat16, ROWS, PROMPT, RESPONSE)
    assert plain.stays == 0
    entries = 2 * ROWS * 2 * 8 * 2  # layers, rows, heads of keys, width, bytes: of one token
    assert 2 * entries * 3 <= plain.cache < 2 * entries * 4 + 1024
    for each in (slots, plain):
        assert each.working >= ROWS * 102 * (4 + 8)  # float32 scores and int64 noise over the vocabulary
