"""Other names: the articles' YAML, verl's and accelerate's keys mean what they say there; overrides win under any name."""

from pathlib import Path

import pytest
import yaml

from rl_core.config import Config, load_config, parse_config
from rl_core.config.effects import notes, without_effect
from rl_core.config.keys import leaves
from rl_core.config.spellings import MEANT, RENAMED
from rl_core.errors import ConfigError

SEED = Path(__file__).resolve().parents[3] / "configs" / "seed"
MODEL = {"model": {"name_or_path": "m", "torch_dtype": "bfloat16"}}
LOCAL = ["model.name_or_path=/tiny/policy", "reward_model.name_or_path=/tiny/judge"]


def value(config: Config, dotted: str) -> object:
    found: object = config
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


def test_the_first_article_s_configuration():
    config = load_config(SEED / "fsdp_config.yaml", LOCAL)
    expected = {
        "model.name_or_path": "/tiny/policy", "model.attn_implementation": "sdpa", "model.torch_dtype": "bfloat16",
        "trainer.type": "ppo", "trainer.num_train_epochs": 1, "trainer.per_device_train_batch_size": 2,
        "trainer.gradient_accumulation_steps": 4, "actor.learning_rate": 1.5e-6,
        "data.max_prompt_length": 512, "rollout.max_new_tokens": 1024 - 512,
        "fsdp.strategy": "fsdp", "fsdp.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp.wrap_policy.auto_wrap": "TRANSFORMER_BASED_WRAP",
        "fsdp.wrap_policy.transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        "reward.kind": "model", "reward.name_or_path": "/tiny/judge", "reward.attn_implementation": "sdpa",
    }  # fmt: skip
    assert {key: value(config, key) for key in expected} == expected
    settled = config.settled(4)
    assert settled.trainer.train_batch_size == 32  # "总 batch size = 32" on its 4 GPUs
    assert without_effect(settled, ranks=4, on_gpu=True) == []
    assert len(notes(config)) == 1, "it names no data"


SNIPPETS = {
    "half_precision.yaml": {
        "model.torch_dtype": "float16", "ref_model.torch_dtype": "float16", "ref_model.disable_half_cast": True,
        "algorithm.kl_in": "reward",
    },
    "activation_checkpointing.yaml": {"fsdp.activation_checkpointing": True, "fsdp.activation_cpu_offload": False},
    "wrap_policy.yaml": {
        "actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap": ["CustomTransformerBlock"],
        "actor.fsdp.wrap_policy.min_num_params": 100_000_000,
    },
    "mixed_precision_trap.yaml": {
        "fsdp.mixed_precision.param_dtype": "bfloat16", "fsdp.mixed_precision.reduce_dtype": "bfloat16",
        "fsdp.mixed_precision.buffer_dtype": "bfloat16",
    },
    "mixed_precision.yaml": {
        "fsdp.mixed_precision.param_dtype": "bfloat16", "fsdp.mixed_precision.reduce_dtype": "float32",
        "fsdp.mixed_precision.buffer_dtype": "float32", "fsdp.mixed_precision.cast_forward_inputs": True,
    },
    "offload.yaml": {"fsdp.param_offload": True, "fsdp.optimizer_offload": True, "fsdp.offload_policy": True},
    "ulysses.yaml": {"actor.fsdp.ulysses_sequence_parallel_size": 2},
    "model_mapping.yaml": {
        "model_mapping.actor": [0, 1, 2, 3], "model_mapping.critic": [4, 5, 6, 7], "model_mapping.ref": [0, 1, 2, 3],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_articles_snippets_mean_what_they_say(name):
    config = load_config(SEED / name)
    assert {key: value(config, key) for key in SNIPPETS[name]} == SNIPPETS[name]
    warned = [line for line in notes(config) if "reduce_dtype" in line]
    assert bool(warned) == (name == "mixed_precision_trap.yaml")


def test_every_file_of_the_articles_is_looked_at():
    assert {path.name for path in SEED.glob("*.yaml")} == {*SNIPPETS, "fsdp_config.yaml"}


def test_sections_may_stand_inside_trainer_as_one_can_read_the_articles():
    inside = parse_config(MODEL | {"trainer": {"fsdp": {"use_fsdp": False}, "ref_model": {"disable_half_cast": True}}})
    assert (inside.fsdp.strategy, inside.ref_model.disable_half_cast) == ("ddp", True)


PLAIN = {  # what a user may write: what it sets
    "trainer.use_ref_model=false": {"algorithm.kl_in": "none"},
    "trainer.dist_backend=gloo": {"launch.dist_backend": "gloo"},
    "model.use_flash_attention_2=true": {"model.attn_implementation": "flash_attention_2"},
    "actor.ulysses_sequence_parallel_size=2": {"actor.fsdp.ulysses_sequence_parallel_size": 2},
    "ulysses_sequence_parallel_size=2": {"fsdp.ulysses_sequence_parallel_size": 2},
    "actor_rollout_ref.ref.fsdp_config.param_offload=true": {"ref_model.fsdp.param_offload": True, "fsdp.param_offload": False},
    "actor_rollout_ref.actor.optim.lr=2e-6": {"actor.learning_rate": 2e-6},
    "critic.optim.lr=2e-5": {"critic.learning_rate": 2e-5},
    "critic.cliprange_value=0.2": {"algorithm.cliprange_value": 0.2},
    "actor_rollout_ref.actor.ppo_mini_batch_size=16": {"trainer.ppo_mini_batch_size": 16},
    "actor_rollout_ref.model.lora_rank=0": {"actor.lora": None},
    "actor_rollout_ref.model.lora_rank=8": {"actor.lora.rank": 8},
    "data.max_response_length=77": {"rollout.max_new_tokens": 77},
    "trainer.test_freq=-1": {"evaluation.every_steps": None},
    "trainer.test_freq=5": {"evaluation.every_steps": 5},
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=2": {"actor.fsdp.strategy": "hsdp", "actor.fsdp.hsdp_group_size": 2},
    "fsdp_config.fsdp_size=-1": {"fsdp.strategy": "fsdp", "fsdp.hsdp_group_size": None},
    "fsdp_config.model_dtype=bf16": {"fsdp.master_dtype": "bfloat16"},
    "fsdp_config.fsdp_sharding_strategy=SHARD_GRAD_OP": {"fsdp.strategy": "fsdp", "fsdp.reshard_after_forward": False},
    "fsdp_config.fsdp_offload_params=true": {"fsdp.offload_policy": True},
    "fsdp.fsdp_transformer_layer_cls_to_wrap='A, B'": {"fsdp.wrap_policy.transformer_layer_cls_to_wrap": ["A", "B"]},
    "critic.fsdp.fsdp_min_num_params=9": {"critic.fsdp.wrap_policy.min_num_params": 9},
    "mixed_precision=bf16": {"fsdp.mixed_precision.param_dtype": "bfloat16"},
    "mixed_precision=no": {"fsdp.mixed_precision.param_dtype": "float32"},
    "custom_reward_function.path=r.py": {"reward.kind": "function", "reward.path": "r.py"},
}


@pytest.mark.parametrize("override", PLAIN)
def test_a_name_of_verl_or_accelerate(override):
    by_override = parse_config(MODEL, [override])
    assert {key: value(by_override, key) for key in PLAIN[override]} == PLAIN[override]
    key, _, text = override.partition("=")
    nested: object = yaml.safe_load(text.replace("2e-", "2.0e-"))
    for name in reversed(key.split(".")):
        nested = {name: nested}
    assert isinstance(nested, dict)
    assert parse_config(nested | {"model": MODEL["model"] | nested.get("model", {})}) == by_override, "in a file alike"


def test_a_mini_batch_of_verl_counts_prompts():
    config = parse_config(MODEL, ["actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=4"])
    assert config.trainer.ppo_mini_batch_size == 64


def test_every_other_name_leads_to_a_key_or_section_that_exists():
    known = {".".join(part.split("[")[0] for part in name.split(".")) for name, _ in leaves(Config)}
    for old, new in RENAMED.items():
        assert any(key == new or key.startswith(f"{new}.") for key in known), f"{old} → {new}"
        assert old not in known, f"{old} is a key of ours"
    assert not known & set(MEANT)


@pytest.mark.parametrize(
    ("file", "override", "expected"),
    [
        ("trainer: {learning_rate: 1.0}", "actor.learning_rate=2.0", {"actor.learning_rate": 2.0}),
        ("actor: {learning_rate: 1.0}", "trainer.learning_rate=2.0", {"actor.learning_rate": 2.0}),
        ("trainer: {max_length: 1024}", "rollout.max_new_tokens=7", {"rollout.max_new_tokens": 7}),
        ("rollout: {max_new_tokens: 7}", "trainer.max_length=1000", {"rollout.max_new_tokens": 488}),
        ("trainer: {max_length: 1024}", "trainer.max_prompt_length=24", {"rollout.max_new_tokens": 1000}),
        ("trainer: {use_ref_model: true}", "algorithm.kl_in=none", {"algorithm.kl_in": "none"}),
        ("algorithm: {kl_in: none}", "trainer.use_ref_model=true", {"algorithm.kl_in": "reward"}),
        ("algorithm: {kl_in: loss}", "trainer.use_ref_model=true", {"algorithm.kl_in": "loss"}),
        ("fsdp: {use_fsdp: true}", "fsdp.strategy=ddp", {"fsdp.strategy": "ddp"}),
        ("fsdp: {strategy: hsdp}", "fsdp.use_fsdp=true", {"fsdp.strategy": "hsdp"}),
        ("fsdp: {strategy: hsdp}", "fsdp.use_fsdp=false", {"fsdp.strategy": "ddp"}),
        ("reward_model: {name_or_path: r}", "reward.attn_implementation=eager", {"reward.attn_implementation": "eager"}),
        ("reward: {kind: reasoning_gym}", "reward_model.name_or_path=r", {"reward.kind": "model", "reward.name_or_path": "r"}),
        ("fsdp_config: {param_offload: true}", "fsdp={optimizer_offload: true}", {"fsdp.param_offload": True}),
    ],
)  # fmt: skip
def test_an_override_wins_over_the_file_under_whatever_name(file, override, expected):
    config = parse_config(MODEL | yaml.safe_load(file), [override])
    assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("file", "both"),
    [
        ("{trainer: {learning_rate: 1.0}, actor: {learning_rate: 2.0}}", ["trainer.learning_rate", "actor.learning_rate = 2.0"]),
        ("{trainer: {max_length: 900}, rollout: {max_new_tokens: 9}}", ["trainer.max_length = 900", "rollout.max_new_tokens"]),
        ("{trainer: {use_ref_model: true}, algorithm: {kl_in: none}}", ["trainer.use_ref_model = True", "algorithm.kl_in"]),
        ("{fsdp: {use_fsdp: true, strategy: ddp}}", ["fsdp.use_fsdp = True", "fsdp.strategy = 'ddp'"]),
        ("{fsdp: {param_offload: true}, fsdp_config: {param_offload: false}}", ["fsdp.param_offload", "fsdp_config.param"]),
        ("{reward: {kind: reasoning_gym}, reward_model: {name_or_path: r}}", ["reward.kind", "reward_model.name_or_path = 'r'"]),
    ],
)  # fmt: skip
def test_two_names_with_different_values_are_refused(file, both):
    with pytest.raises(ConfigError, match=r"contradict each other.*leave one out") as caught:
        parse_config(MODEL | yaml.safe_load(file), origin="x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    assert all(written in str(caught.value) for written in both), caught.value


def test_two_names_with_equal_values_are_accepted():
    values = {
        "trainer": {"learning_rate": 2.0, "max_length": 1024},
        "actor": {"learning_rate": 2.0},
        "rollout": {"max_new_tokens": 512},
    }
    assert parse_config(MODEL | values).actor.learning_rate == 2.0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"trainer.max_length": 512}, r"trainer\.max_length = 512 .*data\.max_prompt_length.*nothing is left for the response"),
        ({"trainer.max_length": "long"}, r"trainer\.max_length = 'long' is not what belongs there"),
        ({"fsdp.fsdp_sharding_strategy": "ZERO9"}, r"'ZERO9' is none of FULL_SHARD"),
        ({"trainer.save_freq": -1}, r"checkpoint\.save_steps \(given as trainer\.save_freq\) = -1"),
        ({"fsdp_config.param_ofload": 1}, r"unknown key fsdp_config\.param_ofload \(did you mean param_offload\?\)"),
        ({"actor_rollout_ref.rollout.temprature": 1}, r"actor_rollout_ref\.rollout\.temprature \(did you mean temperature\?\)"),
        ({"actor_rollout_ref.rollout.name": "vllm"}, r"unknown key actor_rollout_ref\.rollout\.name"),
        ({"trainer.use_ref_modl": True}, r"unknown key trainer\.use_ref_modl \(did you mean use_ref_model\?\)"),
        ({"fsdp.mixed_precision": "int8"}, r"param_dtype \(given as fsdp\.mixed_precision\) = 'int8'"),
    ],
)  # fmt: skip
def test_mistakes_under_other_names_are_named_as_they_were_written(overrides, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(MODEL, overrides)
