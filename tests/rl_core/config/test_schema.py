"""The schema: documentation, identity, batches, and what a role sets apart."""

import pytest

from rl_core.config import parse_config
from rl_core.config.keys import leaves
from rl_core.config.schema import Config
from rl_core.errors import ConfigError

SMALL = {
    "model": {"name_or_path": "some/model"},
    "data": {"source": {"kind": "files", "path": "prompts.jsonl"}},
    "reward": {"kind": "function", "path": "reward.py"},
}


def test_every_key_is_documented():
    assert [name for name, field in leaves(Config) if not field.description and not name.endswith(".kind")] == []


RUNTIME = {
    "model.name_or_path": "other/model", "trainer.max_steps": 9, "trainer.per_device_train_batch_size": 1,
    "trainer.max_tokens_per_micro_batch": 64, "trainer.logger": [], "launch.nproc_per_node": 4, "fsdp.strategy": "hsdp",
    "fsdp.reshard_after_forward": False, "fsdp.param_offload": True, "critic.fsdp.strategy": "ddp", "checkpoint.save_steps": 1,
    "model_mapping.critic": [1], "evaluation.prompts": 3, "evaluation.every_steps": 2, "registry.name": "other",
    "rollout.batch_size": 2, "model.attn_implementation": "eager",
}  # fmt: skip
DECISIVE = {
    "trainer.seed": 1, "trainer.shuffle": False, "trainer.train_batch_size": 8, "rollout.temperature": 0.5, "rollout.n": 2,
    "algorithm.kl_in": "loss", "model.torch_dtype": "bfloat16", "actor.adam_beta2": 0.95, "actor.lora": {},
    "critic.learning_rate": 1.0,
    "fsdp.mixed_precision.reduce_dtype": "bfloat16", "critic.fsdp.master_dtype": "bfloat16", "ref_model.disable_half_cast": True,
}  # fmt: skip


def test_what_only_changes_how_a_run_goes_stays_out_of_its_identity():
    assert parse_config(SMALL, RUNTIME).training_identity() == parse_config(SMALL).training_identity()


@pytest.mark.parametrize("key", DECISIVE)
def test_what_changes_a_step_is_in_the_identity(key):
    assert parse_config(SMALL, {key: DECISIVE[key]}).training_identity() != parse_config(SMALL).training_identity()


def test_the_length_of_a_run_counts_where_the_learning_rate_falls_to_its_end():
    def identity(**overrides):
        return parse_config(SMALL, {name.replace("__", "."): value for name, value in overrides.items()}).training_identity()

    assert identity(trainer__max_steps=5) == identity(trainer__max_steps=6)
    falling = {"critic__lr_scheduler_type": "cosine"}
    assert identity(**falling, trainer__max_steps=5) != identity(**falling, trainer__max_steps=6)


def test_the_number_of_steps_comes_from_max_steps_or_the_epochs():
    assert parse_config(SMALL, {"trainer.max_steps": 7}).total_steps(1000) == 7
    assert parse_config(SMALL, {"trainer.num_train_epochs": 2, "trainer.train_batch_size": 16}).total_steps(100) == 13


@pytest.mark.parametrize(
    ("overrides", "ranks", "prompts"),
    [
        ({}, 4, 64),  # the default
        ({"trainer.per_device_train_batch_size": 2}, 4, 2 * 4 * 4),  # the articles' 2 × 4 on 4 GPUs
        ({"trainer.per_device_train_batch_size": 2, "rollout.n": 4}, 4, 8),
        ({"trainer.per_device_train_batch_size": 2, "model_mapping.actor": [0, 1]}, 4, 2 * 4 * 2),  # ranks of the actor
        ({"trainer.per_device_train_batch_size": 2, "fsdp.ulysses_sequence_parallel_size": 2}, 4, 2 * 4 * 2),
    ],
)
def test_the_batch_follows_from_the_accumulation_and_the_ranks(overrides, ranks, prompts):
    accumulation = {"trainer.gradient_accumulation_steps": 4} if overrides else {}
    config = parse_config(SMALL, overrides | accumulation).settled(ranks)
    assert config.trainer.train_batch_size == prompts
    assert config.samples_per_step == prompts * config.rollout.n
    assert config.settled(ranks + 1) == config, "settled once"


def test_an_accumulation_that_makes_no_whole_prompts_is_refused():
    config = parse_config(
        SMALL, {"trainer.gradient_accumulation_steps": 1, "trainer.per_device_train_batch_size": 3, "rollout.n": 2}
    )
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps: 3 responses.*not a multiple of rollout\.n = 2"):
        config.settled(1)


def test_a_role_overrides_single_keys_of_fsdp():
    config = parse_config(
        SMALL,
        {
            "fsdp.wrap_policy.min_num_params": 5,
            "critic.fsdp.wrap_policy.auto_wrap": "NO_WRAP",
            "ref_model.fsdp.param_offload": True,
        },
    )
    critic = config.fsdp_of("critic").wrap_policy
    assert (critic.auto_wrap, critic.min_num_params) == ("NO_WRAP", 5)
    assert config.fsdp_of("actor").wrap_policy.auto_wrap == "TRANSFORMER_BASED_WRAP"
    assert [config.fsdp_of(role).param_offload for role in ("actor", "critic", "ref")] == [False, False, True]


@pytest.mark.parametrize(
    ("overrides", "dtypes"),
    [
        ({}, ("bfloat16",) * 3),
        ({"critic.torch_dtype": "fp32"}, ("bfloat16", "float32", "bfloat16")),
        ({"ref_model.disable_half_cast": True}, ("bfloat16", "bfloat16", "float32")),
        ({"ref_model.disable_half_cast": True, "ref_model.torch_dtype": "fp16"}, ("bfloat16", "bfloat16", "float16")),
        ({"fsdp.mixed_precision.param_dtype": "fp16", "critic.torch_dtype": "fp32"}, ("float16",) * 3),
    ],
)
def test_the_type_in_which_each_role_computes(overrides, dtypes):
    config = parse_config(SMALL, {"model.torch_dtype": "bf16"} | overrides)
    assert tuple(config.dtype_of(role) for role in ("actor", "critic", "ref")) == dtypes
