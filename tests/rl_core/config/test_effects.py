"""What is said at the start: every key that changes nothing in the mode chosen, and nothing else."""

from pathlib import Path

import pytest

from rl_core.config import load_config, parse_config
from rl_core.config.effects import notes, without_effect
from rl_core.config.keys import leaves
from rl_core.config.schema import Config

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs").rglob("*.yaml"))
MODEL = {"model.name_or_path": "m"}
NO_KL = {"algorithm.kl_in": "none"}
TWO_STEPS = {"trainer.ppo_mini_batch_size": 32}
GRPO = {"algorithm.adv_estimator": "grpo", "rollout.n": 4}
HALF = {"model.torch_dtype": "bfloat16"}
JUDGE = {"reward.kind": "model", "reward.name_or_path": "r"}


def said(overrides: dict, ranks: int = 2, on_gpu: bool = True) -> list[str]:
    return without_effect(parse_config({}, MODEL | overrides), ranks, on_gpu)


SILENT = {  # a value that changes nothing in a mode, the mode, and why
    "trainer.num_train_epochs": (2, {"trainer.max_steps": 3}, "beside trainer.max_steps"),
    "trainer.per_device_train_batch_size": (2, {"trainer.max_tokens_per_micro_batch": 99}, "max_tokens_per_micro_batch"),
    "algorithm.clip_ratio_low": (0.1, {}, "one optimizer step"),
    "algorithm.clip_ratio_high": (0.3, {"trainer.ppo_mini_batch_size": 64}, "one optimizer step"),
    "algorithm.clip_ratio_c": (2.0, {}, "one optimizer step"),
    "algorithm.cliprange_value": (0.1, {}, "one optimizer step"),
    "algorithm.kl_coef": (0.1, NO_KL, "kl_in = none"),
    "algorithm.kl_estimator": ("k2", NO_KL, "kl_in = none"),
    "algorithm.kl_controller": ("adaptive", NO_KL, "kl_in = none"),
    "algorithm.kl_target": (0.2, {}, "kl_controller = fixed"),
    "algorithm.kl_horizon": (5, {}, "kl_controller = fixed"),
    "algorithm.gamma": (0.9, GRPO, "adv_estimator = grpo"),
    "algorithm.lam": (0.9, {"algorithm.adv_estimator": "remax"}, "adv_estimator = remax"),
    "algorithm.norm_adv_by_std_in_grpo": (False, {}, "adv_estimator = gae"),
    "algorithm.critic_warmup": (2, GRPO, "no critic"),
    "model_mapping.critic": ([0], GRPO, "no critic"),
    "algorithm.loss_scale_factor": (9.0, {}, "loss_agg_mode = token-mean"),
    "algorithm.clip_cov_ratio": (0.1, {}, "policy_loss = ppo"),
    "algorithm.clip_cov_lb": (2.0, {}, "policy_loss = ppo"),
    "algorithm.clip_cov_ub": (3.0, {"algorithm.policy_loss": "kl_cov"}, "policy_loss = kl_cov"),
    "algorithm.kl_cov_ratio": (0.1, {}, "policy_loss = ppo"),
    "algorithm.kl_cov_coef": (2.0, {"algorithm.policy_loss": "gpg"}, "policy_loss = gpg"),
    "algorithm.rollout_is_threshold": (3.0, {}, "rollout_is = none"),
    "model_mapping.ref": ([0], NO_KL, "no reference model"),
    "model_mapping.reward": ([0], {}, "reward.kind = reasoning_gym"),
    "ref_model.disable_half_cast": (True, {"ref_model.torch_dtype": "float16"}, "float16 anyway"),
    "actor.torch_dtype": ("bfloat16", {"fsdp.mixed_precision.param_dtype": "fp16"}, "param_dtype = float16"),
    "critic.torch_dtype": ("bfloat16", {"critic.fsdp.mixed_precision.param_dtype": "fp16"}, "param_dtype = float16"),
    "ref_model.torch_dtype": ("bfloat16", {"fsdp.mixed_precision.param_dtype": "fp16"}, "param_dtype = float16"),
    "reward.torch_dtype": ("bfloat16", JUDGE | {"reward.fsdp.mixed_precision.param_dtype": "fp16"}, "param_dtype = float16"),
    "actor.lr_scheduler_type": ("cosine", {"actor.learning_rate": 0}, "learning_rate = 0"),
    "actor.warmup_steps": (2, {"actor.learning_rate": 0}, "learning_rate = 0"),
    "actor.min_lr_ratio": (0.1, {}, "lr_scheduler_type = constant"),
    "actor.weight_decay": (0.1, {"actor.learning_rate": 0}, "learning_rate = 0"),
    "actor.adam_beta1": (0.8, {"actor.learning_rate": 0}, "learning_rate = 0"),
    "actor.adam_beta2": (0.8, {"actor.learning_rate": 0}, "learning_rate = 0"),
    "actor.adam_epsilon": (0.1, {"actor.learning_rate": 0}, "learning_rate = 0"),
    "actor.max_grad_norm": (2.0, {"actor.learning_rate": 0}, "learning_rate = 0"),
    "critic.min_lr_ratio": (0.1, {}, "lr_scheduler_type = constant"),
    "critic.weight_decay": (0.1, {"critic.learning_rate": 0}, "learning_rate = 0"),
    "evaluation.seed": (1, {}, "temperature = 0"),
    "fsdp.hsdp_group_size": (2, {"fsdp.strategy": "ddp"}, "strategy = ddp"),
    "fsdp.wrap_policy.transformer_layer_cls_to_wrap": (["A"], {"fsdp.wrap_policy.auto_wrap": "NO_WRAP"}, "one unit"),
    "fsdp.wrap_policy.min_num_params": (5, {"fsdp.wrap_policy.auto_wrap": "NO_WRAP"}, "one unit"),
    "fsdp.forward_prefetch": (1, {"fsdp.strategy": "ddp"}, "nothing is gathered"),
    "fsdp.mixed_precision.cast_forward_inputs": (False, {}, "computes in float32"),
    "critic.fsdp.hsdp_group_size": (2, {}, "strategy = fsdp"),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_key_without_effect_is_named_with_the_reason_and_only_then(name):
    value, overrides, because = SILENT[name]
    sentences = said(overrides | {name: value})
    assert [line for line in sentences if line.startswith(f"{name} has no effect ") and because in line], sentences
    assert not [line for line in said(overrides) if name in line], "said of a key that nobody set"


HAS_AN_EFFECT = {
    "algorithm.clip_ratio_low": (0.1, TWO_STEPS),
    "algorithm.cliprange_value": (0.1, {"algorithm.ppo_epochs": 2}),
    "trainer.num_train_epochs": (2, {}),
    "algorithm.kl_coef": (0.1, {}),
    "algorithm.gamma": (0.9, {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    "algorithm.norm_adv_by_std_in_grpo": (False, GRPO),
    "algorithm.kl_target": (0.2, {"algorithm.kl_controller": "adaptive"}),
    "algorithm.clip_cov_lb": (0.5, {"algorithm.policy_loss": "clip_cov"}),
    "model_mapping.ref": ([0], {}),
    "model_mapping.reward": ([0], JUDGE),
    "ref_model.disable_half_cast": (True, HALF),
    "actor.torch_dtype": ("bfloat16", {"critic.fsdp.mixed_precision.param_dtype": "float16"}),
    "actor.min_lr_ratio": (0.1, {"actor.lr_scheduler_type": "linear"}),
    "evaluation.seed": (1, {"evaluation.temperature": 1}),
    "fsdp.hsdp_group_size": (2, {"critic.fsdp.strategy": "hsdp"}),  # one role is enough
    "fsdp.forward_prefetch": (1, {}),
    "fsdp.wrap_policy.min_num_params": (5, {"fsdp.wrap_policy.auto_wrap": "SIZE_BASED_WRAP"}),
    "fsdp.mixed_precision.cast_forward_inputs": (False, {"critic.torch_dtype": "bf16"}),
    "fsdp.optimizer_offload": (True, {}),
}


@pytest.mark.parametrize("key", HAS_AN_EFFECT)
def test_no_false_alarm(key):
    value, overrides = HAS_AN_EFFECT[key]
    assert said(overrides | {key: value}) == []


def test_a_key_of_all_roles_is_said_once_and_one_of_a_single_role_under_that_role():
    assert said({"fsdp.param_offload": True}, on_gpu=False) == ["fsdp.param_offload has no effect on a CPU"]
    assert said({"critic.fsdp.param_offload": True}, on_gpu=False) == ["critic.fsdp.param_offload has no effect on a CPU"]
    each = {f"{role}.fsdp.forward_prefetch": 2 for role in ("actor", "critic", "ref_model")}
    assert said(each | {"fsdp.forward_prefetch": 1}) == ["fsdp.forward_prefetch has no effect: every role sets its own"]


@pytest.mark.parametrize("key", ["optimizer_offload", "activation_checkpointing", "activation_cpu_offload", "master_dtype"])
def test_what_is_for_training_changes_nothing_on_a_frozen_model(key):
    value = "bfloat16" if key == "master_dtype" else True
    assert said({f"fsdp.{key}": value}) == []
    for role, mode in {"ref_model": {}, "reward": JUDGE}.items():
        assert said(mode | {f"{role}.fsdp.{key}": value}) == [f"{role}.fsdp.{key} has no effect on a model that is not trained"]


def test_a_reference_that_is_not_built():
    assert said(NO_KL | {"ref_model.torch_dtype": "bf16"}) == [
        "ref_model has no effect with algorithm.kl_in = none: no reference model is built"
    ]


def test_the_size_of_a_group_counts_not_that_of_the_run():
    assert said({"critic.fsdp.forward_prefetch": 1, "model_mapping.critic": [1]}, ranks=2) != []
    assert said({"critic.fsdp.forward_prefetch": 1, "model_mapping.critic": [1, 2]}, ranks=3) == []


def test_a_number_of_ranks_that_torchrun_overrules(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert said({"launch.nproc_per_node": 2}) == ["launch.nproc_per_node has no effect: 4 rank(s) were started on this host"]
    assert said({"launch.nproc_per_node": 4}) == []


ALWAYS = {
    "launch.nproc_per_node", "fsdp.param_offload", "fsdp.optimizer_offload", "fsdp.offload_policy", "fsdp.activation_cpu_offload",
    "fsdp.activation_checkpointing", "fsdp.master_dtype", "fsdp.mixed_precision.reduce_dtype",  # above, in tests of their own
    "model.name_or_path", "model.revision", "model.trust_remote_code", "model.attn_implementation", "model.chat_template",
    "model.torch_dtype", "algorithm.whiten_advantages", "algorithm.ppo_epochs", "algorithm.rollout_is",
    *(f"algorithm.adv_estimator{key}" for key in ("", ".path", ".name", ".critic", ".greedy")),
    *(f"algorithm.policy_loss{key}" for key in ("", ".path", ".name")), "algorithm.loss_agg_mode",
    "algorithm.entropy_coeff", "algorithm.kl_in", "trainer.type", "trainer.deterministic", "trainer.seed",
    "trainer.shuffle", "trainer.max_steps",
    "trainer.train_batch_size", "trainer.gradient_accumulation_steps", "trainer.ppo_mini_batch_size",
    "trainer.max_tokens_per_micro_batch", "trainer.logger", "model_mapping.actor",
    "fsdp.strategy", "fsdp.fsdp_state_dict_type", "fsdp.wrap_policy.auto_wrap", "fsdp.mixed_precision.param_dtype",
    "fsdp.mixed_precision.buffer_dtype", "fsdp.reshard_after_forward", "fsdp.ulysses_sequence_parallel_size",
    *(f"{role}.{key}" for role in ("actor", "critic") for key in ("learning_rate", "optimizer")),
    *(f"{role}.lora{key}" for role in ("actor", "critic") for key in ("", ".rank", ".alpha", ".target_modules")),
}  # fmt: skip
ALWAYS_SECTIONS = ("data", "rollout", "registry", "checkpoint", "evaluation", "reward", "launch")


def test_of_every_key_it_is_decided_whether_some_mode_leaves_it_without_effect():
    decided = ALWAYS | set(SILENT)
    for name, _ in leaves(Config):
        plain = ".".join(part.split("[")[0] for part in name.split("."))
        section, _, below = plain.partition(".")
        if plain in decided or section in ALWAYS_SECTIONS:
            continue
        assert f"actor.{below}" in decided or below in decided, (
            f"{name}: in which mode has it no effect? In none: put it in ALWAYS"
        )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_shipped_configurations_hold_nothing_without_effect(path, on_gpu):
    config = load_config(path)
    ranks = config.launch.nproc_per_node or 8
    sentences = without_effect(config.settled(ranks), ranks, on_gpu)
    if path.name == "half_precision.yaml":  # the article's "key point" really is none
        assert sentences.pop(0) == "ref_model.disable_half_cast has no effect where the reference computes in float16 anyway"
    for line in sentences:
        assert not on_gpu, line
        assert line.endswith("on a CPU"), line


def test_the_default_prompts_are_said():
    (line,) = notes(parse_config({}, MODEL))
    assert line.startswith("data.source is not given: the prompts are 2,000 problems of reasoning-gym's chain_sum")
    written = parse_config(parse_config({}, MODEL).model_dump(mode="json"))
    assert notes(written) == [line], "lost on the way through a file"
    assert notes(parse_config({}, MODEL | {"data.source": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9}})) == []


@pytest.mark.parametrize("key", ["fsdp.mixed_precision.reduce_dtype", "critic.fsdp.mixed_precision.reduce_dtype"])
def test_a_half_type_for_sums_of_gradients_is_warned_about_once(key):
    source = {"data.source": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9}}
    assert notes(parse_config({}, MODEL | source)) == []
    (line,) = notes(parse_config({}, MODEL | source | {key: "bf16"}))
    assert "reduce_dtype = bfloat16" in line
    assert "float32 is safer" in line


def test_a_falling_learning_rate_makes_the_length_part_of_the_run():
    given = {"data.source": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 9}}
    (line,) = notes(parse_config({}, MODEL | given | {"critic.lr_scheduler_type": "cosine"}))
    assert line.startswith("critic.lr_scheduler_type = cosine falls over the whole run")
