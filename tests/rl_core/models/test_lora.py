"""Adapters from the first value to the exported policy, on one rank and on two."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.dcp import load_tensors, save_tensors, stored_tensors
from rl_core.checkpoint.export import export_policy
from rl_core.config.model import PretrainedModel
from rl_core.config.roles import LoraConfig
from rl_core.errors import ConfigError, ModelError
from rl_core.models import lora
from rl_core.models.build import build_critic, build_policy, empty_model
from rl_core.models.source import ModelSource, load_tokenizer
from rl_core.models.tensors import model_tensors, optimizer_tensors, trained_tensors
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config, family, ragged
from tests.tiny import tiny_tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {"rank": 3, "alpha": 12},
    "llama-untied": {"rank": 2, "alpha": 1, "target_modules": ["self_attn.q_proj", "down_proj"]},
    "deepseek-v2": {"rank": 2},
}
"""Conv1D and tied embeddings; chosen layers and an output head of its own; experts."""
ADAPTED = {"gpt2": 2 * 4, "llama-untied": 2 * 2, "deepseek-v2": 2 * 5 + 3 + 3}
"""Layers: of two; DeepSeek's first has a dense network and its second shared experts beside those that are chosen from."""
AMONG = {
    "gpt2": "transformer.h.0.attn.c_attn", "llama-untied": "model.layers.1.self_attn.q_proj",
    "deepseek-v2": "model.layers.1.mlp.shared_experts.gate_proj",
}  # fmt: skip
UNITS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_checkpointing": True}, "llama-untied": {"reshard_after_forward": False}, "deepseek-v2": {}
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ragged()[0], use_cache=False).logits


def trained_logits(policy: Any) -> torch.Tensor:
    """Of the model in training, whose parameters it leaves gathered."""
    with torch.no_grad():
        policy(*ragged(), 1.0, False)
    policy.unshard()
    return logits(policy.model)


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().full_tensor().clone() for name, tensor in tensors.items()}


def trained(rank: int, bases: dict[str, Path], out: Path) -> dict[str, Any]:
    """Two updates of each family's adapters, stored under `out`; what happened on the way."""
    from rl_core.groups import make_groups
    from rl_core.rollout.engine import RolloutEngine
    from rl_core.rollout.sync import sync_weights

    seen: dict[str, Any] = {}
    for name, base in bases.items():
        settings, cpu = config(actor={"lora": SETTINGS[name]}, critic={"lora": {}}, fsdp=UNITS[name]), torch.device("cpu")
        groups = make_groups(settings, ["actor", "critic"], "cpu")
        torch.manual_seed(rank)  # what else is drawn must not matter
        policy = build_policy(base, settings, "actor", groups["actor"], cpu, trainable=True)
        first, before = whole(trained_tensors(policy)), whole(model_tensors(policy))
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=0.02, foreach=True)
        untrained = trained_logits(policy)
        for _ in range(2):
            optimizer.zero_grad()
            policy(*ragged(), 1.0, False)[0].mean().backward()
            optimizer.step()
        after = trained_logits(policy)
        engine = RolloutEngine(base, torch.float32, "cpu")
        sync_weights(policy, engine)
        rollout = logits(engine.model)
        moments = optimizer_tensors(policy, optimizer)
        stored = {f"actor.{name}": tensor for name, tensor in trained_tensors(policy).items()}
        stored |= {f"actor_optimizer.{name}": tensor for name, tensor in moments.items()}
        save_tensors(stored, out / name)
        unchanged = all(torch.equal(before[name], tensor) for name, tensor in whole(model_tensors(policy)).items())

        fresh = build_policy(base, settings, "actor", groups["actor"], cpu, trainable=True)
        resumed = {f"actor.{name}": tensor for name, tensor in trained_tensors(fresh).items()}
        load_tensors(resumed, out / name, strict=False)

        critic = build_critic(base, settings, groups["critic"], cpu)
        critic(*ragged()).sum().backward()
        seen[name] = {
            "first": first, "moments": sorted(moments), "untrained": untrained, "after": after, "rollout": rollout,
            "unchanged": unchanged, "resumed": trained_logits(fresh), "critic": sorted(trained_tensors(critic)),
            "critic_gradients": [p.grad is not None for n, p in critic.named_parameters() if lora.is_adapter(n) or "head" in n],
            "frozen": [n for n, p in policy.named_parameters() if not p.requires_grad],
        }  # fmt: skip
    return seen


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    for name in SETTINGS:
        source = ModelSource(tiny_tokenizer(family(root / f"{name}-source", name)))
        convert(source, load_tokenizer(source), root / name)
    return {name: root / name for name in SETTINGS}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def seen(bases: dict[str, Path], out: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank saw, by number of ranks."""
    return {world: run_ranks(trained, world, bases, out / str(world)) for world in (1, 2)}


@pytest.mark.parametrize("name", SETTINGS)
def test_first_values(name: str, seen: dict[int, list[dict[str, Any]]], bases: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    first = seen[1][0][name]["first"]
    for values in (rank[name]["first"] for ranks in seen.values() for rank in ranks):
        assert values.keys() == first.keys()
        assert all(torch.equal(values[key], tensor) for key, tensor in first.items())
    drawn = [tensor for key, tensor in first.items() if "lora_A" in key]
    assert not any(tensor.any() for key, tensor in first.items() if "lora_B" in key)
    for tensor in drawn:  # peft: kaiming_uniform_(a=√5), which is uniform within ±1/√in
        assert tensor.dtype == torch.float32
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound
        assert abs(float(tensor.std()) - bound / 3**0.5) < 0.2 * bound
    assert len({tuple(tensor.flatten()[:4].tolist()) for tensor in drawn}) == len(drawn)
    base = AutoModelForCausalLM.from_pretrained(bases[name].parent / f"{name}-source")
    torch.testing.assert_close(seen[1][0][name]["untrained"], logits(base), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_adapters_alone_are_trained_and_stored(name: str, seen: dict[int, list[dict[str, Any]]], out: Path) -> None:
    one = seen[1][0][name]
    for rank in (rank[name] for ranks in seen.values() for rank in ranks):
        assert rank["unchanged"]
        torch.testing.assert_close(rank["after"], one["after"], rtol=0, atol=1e-4)
        torch.testing.assert_close(rank["resumed"], rank["after"], rtol=0, atol=1e-6)
        assert rank["moments"] == one["moments"]
        assert all(rank["critic_gradients"])
        assert not any(lora.is_adapter(key) for key in rank["frozen"])
    assert (one["after"] - one["untrained"]).abs().max() > 0.1
    stored = stored_tensors(out / "2" / name)
    assert all(".lora_A.weight" in key or ".lora_B.weight" in key for key in stored)
    for key in (f"{AMONG[name]}.lora_A.weight", f"{AMONG[name]}.lora_B.weight"):
        assert {f"actor.{key}", f"actor_optimizer.{key}.exp_avg"} <= stored.keys()
    assert len(one["first"]) == 2 * ADAPTED[name]
    assert {"value_head.bias", "value_head.weight"} == {key for key in one["critic"] if not lora.is_adapter(key)}


@pytest.mark.parametrize("name", SETTINGS)
def test_rollouts_are_those_of_the_adapted_policy(name: str, seen: dict[int, list[dict[str, Any]]]) -> None:
    for rank in (rank[name] for ranks in seen.values() for rank in ranks):
        torch.testing.assert_close(rank["rollout"], rank["after"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_merged_and_adapter_alone(
    name: str, seen: dict[int, list[dict[str, Any]]], bases: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(**SETTINGS[name])
    for directory in (tmp_path / "one", tmp_path / "other"):
        export_policy(out / "2" / name, "actor.", bases[name], directory, lora=settings)
    expected = seen[2][0][name]["after"]
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "one")), expected, rtol=0, atol=2e-5)
    if name == "deepseek-v2":  # peft would put these adapters elsewhere
        assert not (tmp_path / "one" / "adapter").exists()
    else:
        base = AutoModelForCausalLM.from_pretrained(bases[name].parent / f"{name}-source")
        adapted = PeftModel.from_pretrained(base, tmp_path / "one" / "adapter")
        torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=2e-5)
    # Equal tensors give equal files.
    for path in sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()):
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "other" / path).read_bytes(), path


def test_export_of_other_adapters_than_trained(
    seen: dict[int, list[dict[str, Any]]], bases: dict[str, Path], out: Path, tmp_path: Path
) -> None:
    for settings, message in [(None, "missing: actor.transformer.wte.weight"), (LoraConfig(rank=4), "of another shape")]:
        with pytest.raises(ModelError, match=message):
            export_policy(out / "1" / "gpt2", "actor.", bases["gpt2"], tmp_path / "out", lora=settings)
    assert not (tmp_path / "out").exists()


def empty(bases: dict[str, Path], name: str) -> Any:
    return empty_model(bases[name], PretrainedModel(name_or_path="unused"), torch.bfloat16)


def test_adapters_are_float32_beside_a_base_in_another_type(bases: dict[str, Path]) -> None:
    causal = empty(bases, "gpt2")
    lora.add_adapters(causal, LoraConfig())
    types = {lora.is_adapter(name): parameter.dtype for name, parameter in causal.named_parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    assert all(parameter.is_meta for parameter in causal.parameters())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["q_proj", "wq"], r"critic.lora.target_modules.*named wq .*down_proj, gate_proj, k_proj"),
        (["lm_head"], r"named lm_head .*\(the output head does not count\)"),
        (["embed_tokens"], "named embed_tokens"),
        (["proj"], "named proj"),
        ([], "none given"),
    ],
)
def test_names_of_no_linear_layer(bases: dict[str, Path], wanted: list[str], message: str) -> None:
    causal = empty(bases, "llama-untied")
    with pytest.raises(ConfigError, match=message):
        lora.add_adapters(causal, LoraConfig(target_modules=wanted), role="critic")
    assert not lora.adapted_layers(causal)


def test_without_peft(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"actor.lora needs the package peft.*pip install"):
        lora.add_adapters(empty(bases, "gpt2"), LoraConfig())
