"""Other names under which users of verl, accelerate and the articles know our keys, and what they mean in ours.

A name has to mean the same there as here: what only sounds alike is left out, and refused as an unknown key.
"""

from collections.abc import Callable
from typing import Any

from rl_core.errors import ConfigError

Lookup = Callable[[str], Any]
"""The value of one of our keys as it is given anywhere in the configuration; None where it is not."""
Meaning = Callable[[Any, Lookup], dict[str, Any]]
"""Of a value under another name: the keys of ours that it sets."""

RENAMED = {
    # The articles
    "trainer.learning_rate": "actor.learning_rate",
    "trainer.max_prompt_length": "data.max_prompt_length",
    "trainer.ref_model_dtype": "ref_model.torch_dtype",
    "trainer.dist_backend": "launch.dist_backend",
    "trainer.dist_timeout_s": "launch.dist_timeout_s",
    "trainer.ref_model": "ref_model",
    "trainer.fsdp": "fsdp",
    "reward_model": "reward",
    "fsdp_config": "fsdp",
    "mixed_precision": "fsdp.mixed_precision",
    "wrap_policy": "fsdp.wrap_policy",
    "activation_checkpointing": "fsdp.activation_checkpointing",
    "activation_cpu_offload": "fsdp.activation_cpu_offload",
    # verl
    "actor_rollout_ref.model.path": "model.name_or_path",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.fsdp.activation_checkpointing",
    "actor_rollout_ref.actor.fsdp_config": "actor.fsdp",
    "actor_rollout_ref.actor.optim.lr": "actor.learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "actor.warmup_steps",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "actor.min_lr_ratio",
    "actor_rollout_ref.actor.optim.weight_decay": "actor.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "actor.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.ppo_epochs",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.clip_ratio_c",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coeff",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.per_device_train_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    "actor_rollout_ref.ref.fsdp_config": "ref_model.fsdp",
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "critic.optim.lr": "critic.learning_rate",
    "critic.optim.lr_warmup_steps": "critic.warmup_steps",
    "critic.optim.min_lr_ratio": "critic.min_lr_ratio",
    "critic.optim.weight_decay": "critic.weight_decay",
    "critic.grad_clip": "critic.max_grad_norm",
    "critic.cliprange_value": "algorithm.cliprange_value",
    "critic.model.fsdp_config": "critic.fsdp",
    "critic.model.enable_gradient_checkpointing": "critic.fsdp.activation_checkpointing",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "data.prompt_key": "data.prompt_column",
    "data.train_batch_size": "trainer.train_batch_size",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.shuffle": "trainer.shuffle",
    "trainer.total_epochs": "trainer.num_train_epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.save_freq": "checkpoint.save_steps",
    "trainer.n_gpus_per_node": "launch.nproc_per_node",
    "trainer.project_name": "registry.experiment",
    "custom_reward_function": "reward",
} | {
    f"{place}ulysses_sequence_parallel_size": f"{fsdp}.ulysses_sequence_parallel_size"
    for place, fsdp in {
        "": "fsdp", "actor.": "actor.fsdp", "critic.": "critic.fsdp", "ref_model.": "ref_model.fsdp",
        "actor_rollout_ref.actor.": "actor.fsdp", "actor_rollout_ref.ref.": "ref_model.fsdp",
    }.items()
}  # fmt: skip
"""Names of keys and sections. verl's single `clip_ratio` and its batch sizes of the critic are not among them: they mean less,
or more, than ours."""

RENAMED_IN_FSDP = {
    "fsdp_auto_wrap_policy": "wrap_policy.auto_wrap",
    "fsdp_transformer_layer_cls_to_wrap": "wrap_policy.transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "wrap_policy.min_num_params",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_forward_prefetch": "forward_prefetch",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_offload_params": "offload_policy",
    "model_dtype": "master_dtype",
}
"""Names in `fsdp` and in each role's `fsdp`: accelerate's family, and verl's."""

IMPLIED = {"reward_model": ("reward.kind", "model"), "custom_reward_function": ("reward.kind", "function")}
"""What a section's other name says beside its keys."""


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _attention(section: str) -> Meaning:
    key = f"{section}.attn_implementation"

    def meaning(value: Any, lookup: Lookup) -> dict[str, Any]:
        if _truth(value):
            return {key: "flash_attention_2"}
        return {key: "sdpa"} if lookup(key) == "flash_attention_2" else {}

    return meaning


def _reference(value: Any, lookup: Lookup) -> dict[str, Any]:
    if not _truth(value):
        return {"algorithm.kl_in": "none"}
    return {"algorithm.kl_in": "reward"} if lookup("algorithm.kl_in") == "none" else {}


def _length(value: Any, lookup: Lookup) -> dict[str, Any]:
    prompt = lookup("data.max_prompt_length") or 512
    if value <= prompt:
        raise ConfigError(
            f"trainer.max_length = {value} holds prompt and response, and the prompt may have {prompt} tokens "
            "(data.max_prompt_length): nothing is left for the response. Raise the one or lower the other."
        )
    return {"rollout.max_new_tokens": value - prompt}


MEANT: dict[str, Meaning] = {
    "model.use_flash_attention_2": _attention("model"),
    "reward.use_flash_attention_2": _attention("reward"),
    "trainer.use_ref_model": _reference,
    "trainer.max_length": _length,
    "trainer.test_freq": lambda value, _: {"evaluation.every_steps": value if value > 0 else None},
    "actor_rollout_ref.actor.ppo_mini_batch_size": lambda value, lookup: {
        "trainer.ppo_mini_batch_size": value * (lookup("rollout.n") or 1)  # verl counts prompts, we count responses
    },
    "actor_rollout_ref.model.lora_rank": lambda value, _: {"actor.lora.rank": value} if value else {"actor.lora": None},
    "actor_rollout_ref.model.lora_alpha": lambda value, lookup: {"actor.lora.alpha": value} if lookup("actor.lora.rank") else {},
}
"""Names whose values become others, in the order in which they are looked at."""


def _use(value: Any, lookup: Lookup) -> dict[str, Any]:
    sharded, own = ("fsdp", "hsdp"), lookup("strategy")
    return {} if own is not None and (own in sharded) == _truth(value) else {"strategy": "fsdp" if _truth(value) else "ddp"}


def _size(value: Any, _: Lookup) -> dict[str, Any]:
    return {"strategy": "hsdp", "hsdp_group_size": value} if value > 0 else {"strategy": "fsdp", "hsdp_group_size": None}


SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"strategy": "fsdp", "reshard_after_forward": True},
    "SHARD_GRAD_OP": {"strategy": "fsdp", "reshard_after_forward": False},
    "HYBRID_SHARD": {"strategy": "hsdp", "reshard_after_forward": True},
    "HYBRID_SHARD_ZERO2": {"strategy": "hsdp", "reshard_after_forward": False},
    "NO_SHARD": {"strategy": "ddp"},
}


def _sharding(value: Any, _: Lookup) -> dict[str, Any]:
    if value not in SHARDING:
        raise ConfigError(f"fsdp_sharding_strategy = {value!r} is none of {', '.join(SHARDING)}.")
    return SHARDING[value]


MEANT_IN_FSDP: dict[str, Meaning] = {
    "use_fsdp": _use,
    "fsdp_size": _size,
    "fsdp_sharding_strategy": _sharding,
    "mixed_precision": lambda value, _: {
        "mixed_precision.param_dtype": value or "float32"
    },  # YAML reads accelerate's `no` as false
}
"""As `MEANT`, for `fsdp` and each role's `fsdp`; keys and lookups are relative to the section."""


def our_name(key: str) -> str:
    """A key or section under our name; one whose value has to be translated (`meaning_of`) keeps its last part."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            key = new + key[len(old) :]
    section, below = in_fsdp(key)
    first, dot, rest = below.partition(".")
    return f"{section}.{RENAMED_IN_FSDP[first]}{dot}{rest}" if section and first in RENAMED_IN_FSDP else key


def in_fsdp(key: str) -> tuple[str, str]:
    """A key split into the `fsdp` section that it stands in and the rest; two empty texts where it stands in none."""
    if key.startswith("fsdp."):
        return "fsdp", key[len("fsdp.") :]
    role, found, below = key.partition(".fsdp.")
    return (f"{role}.fsdp", below) if found else ("", "")


def meaning_of(key: str) -> Meaning | None:
    """How to translate the value of a key that `our_name` gave; None where it is one of ours as it stands."""
    if key in MEANT:
        return MEANT[key]
    section, below = in_fsdp(key)
    relative = MEANT_IN_FSDP.get(below)
    if relative is None:
        return None
    return lambda value, lookup: {
        f"{section}.{name}": item for name, item in relative(value, lambda name: lookup(f"{section}.{name}")).items()
    }


def other_names() -> list[str]:
    """All names that are understood beside ours."""
    in_any_fsdp = (*RENAMED_IN_FSDP, *MEANT_IN_FSDP)
    return [*RENAMED, *MEANT, "reward_model.use_flash_attention_2", *(f"fsdp.{name}" for name in in_any_fsdp)]
