"""The configurations that come with the project: valid, and those of real models fit them, built on the meta device.

No hub is asked: `architectures.json` holds what counts of the models' public config.json, and their published sizes.
"""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config, load_config
from rl_core.config.reward import FunctionReward
from rl_core.data.prompts import Prompt
from rl_core.rewards import build_reward

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
TEMPLATES = [path for path in CONFIGS if path.parent.name not in ("configs", "seed")]
ARCHITECTURES = json.loads((ROOT / "tests" / "architectures.json").read_text(encoding="utf-8"))
FAMILIES = {"qwen2", "qwen2.5", "qwen3", "llama3", "deepseek", "gemma"}
GPU = 80e9


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture
def ranks() -> Iterator[Callable[[int], None]]:
    """Makes this process rank 0 of so many, without the others: nothing may be communicated."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    yield lambda size: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    dist.destroy_process_group()


@cache
def on_meta(model: str, attention: str, layers: int | None = None) -> Any:
    """The real model by its hub name, without memory for its weights; with fewer layers where their number is given."""
    import torch
    from transformers import AutoConfig

    from rl_core.models.auto import model_of

    described = {key: value for key, value in ARCHITECTURES[model].items() if key != "parameters"}
    if layers is not None:
        described["num_hidden_layers"] = layers
    with torch.device("meta"):
        return model_of(AutoConfig.for_model(**described), torch.float32, attention=attention)


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_is_valid(path: Path) -> None:
    assert load_config(path).model.name_or_path


def test_there_is_a_template_for_each_family() -> None:
    assert {path.parent.name for path in TEMPLATES} == FAMILIES
    assert {load_config(path).model.name_or_path for path in TEMPLATES} == set(ARCHITECTURES)


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_fits_its_model(path: Path) -> None:
    from rl_core.models.lora import target_layers
    from rl_core.models.sharding import unit_classes

    config = load_config(path)
    architecture = ARCHITECTURES[config.model.name_or_path]
    model = on_meta(config.model.name_or_path, config.model.attn_implementation)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(architecture["parameters"], rel=0.02)
    assert model.config._attn_implementation == config.model.attn_implementation
    assert config.data.max_prompt_length + config.rollout.max_new_tokens <= architecture["max_position_embeddings"]
    for role in ("actor", "critic", "ref"):
        classes = unit_classes(model, config.fsdp_of(role).wrap_policy)
        units = [module for module in model.modules() if type(module).__name__ in classes]
        assert len(units) == architecture["num_hidden_layers"]
    for trained in (config.actor, config.critic):
        if trained.lora is not None:
            assert len(target_layers(model, trained.lora)) == 7 * architecture["num_hidden_layers"]


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_spreads_its_model_over_its_gpus(path: Path, ranks: Callable[[int], None]) -> None:
    """Two of its layers: all of them take seconds, and how many units they make is looked at above."""
    import torch

    from rl_core.groups import make_groups
    from rl_core.models.lora import add_adapters
    from rl_core.models.policy import PolicyModel
    from rl_core.models.sharding import shard, unit_classes
    from rl_core.models.value import ValueModel

    config = load_config(path)
    size, layers = config.launch.nproc_per_node, 2
    assert size is not None
    ranks(size)
    groups = make_groups(config, config.roles(), "cpu")
    assert set(groups) == {"actor", "critic", "ref"}
    for role, group in groups.items():
        causal = deepcopy(on_meta(config.model.name_or_path, config.model.attn_implementation, layers))
        lora = getattr(config.role(role), "lora", None)
        if lora is not None:
            add_adapters(causal, lora, role)
        module: Any = ValueModel(causal.base_model, group) if role == "critic" else PolicyModel(causal, group)
        plain = sum(parameter.numel() for parameter in module.parameters())
        settings, compute = config.fsdp_of(role), getattr(torch, config.dtype_of(role))
        report = shard(module, unit_classes(causal, settings.wrap_policy), settings, compute, group.mesh)
        assert report.units == layers + (2 if role == "critic" else 1), "layers, head, the rest"
        assert (report.shards, report.replicas, report.parameters) == (size, 1, plain)
        assert report.local_parameters == pytest.approx(plain / size, rel=0.01)
        assert report.compute == config.dtype_of(role)
        assert all(parameter.to_local().is_meta for parameter in module.parameters()), "nothing has memory"


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_leaves_room_on_its_gpus(path: Path) -> None:
    config = load_config(path)
    ranks, parameters = config.launch.nproc_per_node, ARCHITECTURES[config.model.name_or_path]["parameters"]
    assert ranks is not None
    assert f"{ranks}gpu" in path.stem
    assert weights_on_a_rank(config, parameters, ranks) < 0.8 * GPU, "a fifth is for activations, logits and the KV cache"


def weights_on_a_rank(config: Config, parameters: int, ranks: int) -> float:
    """Bytes of weights, gradients and moments in the largest phase, an update, and of the rollout's weights."""
    size = {"float32": 4, "bfloat16": 2}
    waiting = training = 0
    for role in ("actor", "critic", "ref"):
        fsdp = config.fsdp_of(role)
        held = size[fsdp.master_dtype] if role != "ref" else size[config.dtype_of(role)]
        full = role != "ref" and getattr(config, role).lora is None
        moments = 2 * size[fsdp.master_dtype] if full else 0
        waiting_now = (0 if fsdp.param_offload else held) + (0 if fsdp.optimizer_offload else moments)
        waiting += waiting_now
        if role != "ref":
            gradients = size[fsdp.master_dtype] if full else 0
            training = max(training, held + moments + gradients - waiting_now)
    return (waiting + training) * parameters / ranks + size[config.dtype_of("actor")] * parameters


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("3 + 4 = 7\n#### 7", 1.0), ("#### 7.00", 1.0), ("so it is $7.", 1.0), ("8 apples, then 7", 1.0),
        ("7 apples, then 8", 0.0), ("#### 8, not 7", 0.0), ("first #### 8\nno: #### 7", 1.0), ("####", 0.0),
        ("none", 0.0), ("", 0.0), ("#### -7", 0.0),
    ],
)  # fmt: skip
def test_the_reward_of_gsm8k(response: str, score: float) -> None:
    assert gsm8k(response, "He has 3 and gets 4, 3+4=<<3+4=7>>7.\n#### 7") == score


def test_the_reward_of_gsm8k_reads_thousands() -> None:
    assert gsm8k("It costs 1234.0 dollars", "#### 1,234") == 1.0


def gsm8k(response: str, solution: str) -> float:
    """What a run with the templates' `reward` section gives for a response."""
    path = str(ROOT / "configs" / "rewards" / "gsm8k.py")
    reward = build_reward(FunctionReward(kind="function", path=path, timeout_s=None))
    assert reward is not None
    (judgement,) = reward([Prompt("id", [1], "text", "question", solution, "openai/gsm8k", {})], [response], [[1]])
    return judgement.score
