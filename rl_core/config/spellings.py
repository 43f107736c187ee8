"""Other names under which users of verl, accelerate and the articles know our keys; each is put where it belongs.

A name of ours always wins: giving both is an error.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import ConfigError

RENAMED = {
    "trainer.learning_rate": "actor.learning_rate",
    "trainer.max_prompt_length": "data.max_prompt_length",
    "trainer.ref_model_dtype": "ref_model.torch_dtype",
    "trainer.dist_backend": "launch.dist_backend",
    "trainer.dist_timeout_s": "launch.dist_timeout_s",
    "fsdp.fsdp_auto_wrap_policy": "fsdp.wrap_policy.auto_wrap",
    "fsdp.fsdp_transformer_layer_cls_to_wrap": "fsdp.wrap_policy.transformer_layer_cls_to_wrap",
    "fsdp.fsdp_min_num_params": "fsdp.wrap_policy.min_num_params",
    "fsdp.fsdp_reshard_after_forward": "fsdp.reshard_after_forward",
    "fsdp.fsdp_activation_checkpointing": "fsdp.activation_checkpointing",
    "fsdp.fsdp_offload_params": "fsdp.offload_policy",
    "fsdp_config": "fsdp",
    "mixed_precision": "fsdp.mixed_precision",
    "wrap_policy": "fsdp.wrap_policy",
    "activation_checkpointing": "fsdp.activation_checkpointing",
    "ulysses_sequence_parallel_size": "fsdp.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config": "actor.fsdp",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "actor.fsdp.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.fsdp_config": "ref_model.fsdp",
}
"""Dotted names, in the order in which they are looked for."""



def _reference(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    if value and _get(values, "algorithm.kl_in") == "none":
        raise ConfigError("trainer.use_ref_model = true, but algorithm.kl_in = none needs no reference; leave one out.")
    return {} if value else {"algorithm.kl_in": "none"}


def _attention(section: str) -> "Translation":
    return lambda value, _: {f"{section}.attn_implementation": "flash_attention_2" if value else "sdpa"}


Translation = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
TRANSLATED: dict[str, Translation] = {
    "model.use_flash_attention_2": _attention("model"),
    "reward_model.use_flash_attention_2": _attention("reward"),
    "reward_model": lambda value, _: {"reward": {"kind": "model", **value}},
    "fsdp.use_fsdp": lambda value, _: {"fsdp.strategy": "fsdp" if value else "ddp"},
    "trainer.use_ref_model": _reference,
    "trainer.max_length": lambda value, values: {
        "rollout.max_new_tokens": value - (_get(values, "data.max_prompt_length") or 512)
    },
}
"""Names whose value becomes another: of the value and the whole configuration, the keys that it stands for."""


def translated(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The configuration with our names only; a copy.

    Raises:
        ConfigError: a key is given under two names with different values.
    """
    result: dict[str, Any] = _copy(values)
    for old, new in RENAMED.items():
        if (value := _pop(result, old)) is not None:
            _put(result, new, value, old, origin)
    for old, stands_for in TRANSLATED.items():
        if (value := _pop(result, old)) is not None:
            try:
                meant = stands_for(value, result)
            except TypeError:
                raise ConfigError(f"{origin}: {old} = {value!r} is not what belongs there.") from None
            for new, item in meant.items():
                _put(result, new, item, old, origin)
    return result


def in_our_names(key: str, value: Any, values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """What an override of one dotted key, under any name, sets in a configuration that has our names already."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return {new + key[len(old) :]: value}
    if key in TRANSLATED:
        return TRANSLATED[key](value, values)
    return {key: value}


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _get(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _pop(values: dict[str, Any], dotted: str) -> Any:
    """The value, taken out together with sections that are empty then."""
    *parents, last = dotted.split(".")
    section = _get(values, ".".join(parents)) if parents else values
    if not isinstance(section, dict) or last not in section:
        return None
    value = section.pop(last)
    if parents and not section:
        _pop(values, ".".join(parents))
    return value


def _put(values: dict[str, Any], dotted: str, value: Any, old: str, origin: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _put(values, f"{dotted}.{name}", item, old, origin)
        return
    *parents, last = dotted.split(".")
    for name in parents:
        if not isinstance(values.setdefault(name, {}), dict):
            raise ConfigError(f"{origin}: {name} = {values[name]!r} must be a section.")
        values = values[name]
    if values.setdefault(last, value) != value:
        raise ConfigError(f"{origin}: {old} means {dotted} = {value!r}, but that is {values[last]!r} there; leave one out.")
