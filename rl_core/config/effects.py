"""What a configuration does without saying so: keys that change nothing in the mode that other keys choose, and defaults that a
user should know of. Said at the start, never silently."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from rl_core.config.data import DataConfig, ReasoningGymSource
from rl_core.config.fsdp import FsdpConfig
from rl_core.config.reward import ModelReward, WeightedReward, model_of, with_model
from rl_core.config.schema import Config, Role

ADAMW = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")
SCHEDULE = ("lr_scheduler_type", "warmup_steps", "min_lr_ratio")
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "cliprange_value")
LOSSES = {
    "ppo": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "gspo": ("clip_ratio_low", "clip_ratio_high"),
    "cispo": ("clip_ratio_low", "clip_ratio_high"),
    "gpg": (),
    "clip_cov": ("clip_ratio_low", "clip_ratio_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "kl_cov_coef"),
}
"""The keys that each policy loss reads."""
OF_LOSSES = sorted({key for keys in LOSSES.values() for key in keys})
OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy", "activation_cpu_offload")
TRAINING_ONLY = (
    "optimizer_offload",
    "activation_checkpointing",
    "activation_cpu_offload",
    "master_dtype",
    "mixed_precision.reduce_dtype",
)
CLASSES, LEAST = "wrap_policy.transformer_layer_cls_to_wrap", "wrap_policy.min_num_params"

Case = tuple[bool, Sequence[str], str]
"""Whether the mode is given, the keys that change nothing in it, and why."""


def without_effect(config: Config, ranks: int, on_gpu: bool) -> list[str]:
    """One sentence per key whose value is not the default and changes nothing in a run on so many ranks in all."""
    reward, judge = config.reward, model_of(config.reward)
    if judge is not None:
        reward = with_model(reward, ModelReward(kind="model", name_or_path=judge.name_or_path))
    default = Config(model=config.model, reward=reward, data=config.data)
    said = [
        f"{key} has no effect {because}"
        for given, keys, because in _cases(config, on_gpu)
        for key in keys
        if given and _value(config, key) != _value(default, key)
    ]
    started = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if config.launch.nproc_per_node not in (None, started):
        said.append(f"launch.nproc_per_node has no effect: {started} rank(s) were started on this host")
    return said + list(_fsdp(config, ranks, on_gpu))


def notes(config: Config) -> list[str]:
    """What is in force because nothing else was said, and what is taken at the user's word although it is risky."""
    said = []
    source = config.data.source
    if source == DataConfig().source:
        assert isinstance(source, ReasoningGymSource)
        said.append(
            f"data.source is not given: the prompts are {source.size:,} problems of reasoning-gym's {source.dataset}, sums of two"
            " digits. Your own: data.source = {kind: files, path: prompts.jsonl}"
        )
    for name, trained in (("actor", config.actor), ("critic", config.critic)):
        if trained.lr_scheduler_type != "constant":
            said.append(
                f"{name}.lr_scheduler_type = {trained.lr_scheduler_type} falls over the whole run: with another length "
                "(trainer.max_steps, num_train_epochs) it is another run, from step 0"
            )
    risky = {role: dtype for role in config.roles() if (dtype := config.fsdp_of(role).mixed_precision.reduce_dtype) != "float32"}
    for dtype in sorted(set(risky.values())):
        said.append(
            f"mixed_precision.reduce_dtype = {dtype}: gradients that are small against the sum are lost; float32 is safer"
        )
    return said


def _cases(config: Config, on_gpu: bool) -> Iterator[Case]:
    trainer, algorithm, reference = config.trainer, config.algorithm, config.ref_model
    yield trainer.max_steps is not None, ["trainer.num_train_epochs"], "beside trainer.max_steps"
    yield (
        trainer.max_tokens_per_micro_batch is not None and trainer.gradient_accumulation_steps is None,
        ["trainer.per_device_train_batch_size"],
        "beside trainer.max_tokens_per_micro_batch",
    )
    yield (
        algorithm.ppo_epochs == 1 and trainer.ppo_mini_batch_size in (None, _responses(config)),
        [f"algorithm.{key}" for key in CLIPS],
        "with one optimizer step for each batch of responses: the policy that is updated is the one that answered",
    )
    estimator, loss = algorithm.adv_estimator, algorithm.policy_loss
    if not algorithm.needs.critic:
        no_critic = f"with algorithm.adv_estimator = {estimator}: there is no critic"
        yield True, ["algorithm.cliprange_value", "algorithm.critic_warmup", "critic", "model_mapping.critic"], no_critic
    if isinstance(estimator, str):
        discounted = estimator in ("gae", "reinforce_plus_plus")
        yield not discounted, ["algorithm.gamma"], f"with algorithm.adv_estimator = {estimator}"
        yield estimator != "gae", ["algorithm.lam"], f"with algorithm.adv_estimator = {estimator}"
        yield estimator != "grpo", ["algorithm.norm_adv_by_std_in_grpo"], f"with algorithm.adv_estimator = {estimator}"
    if isinstance(loss, str):
        unread = [key for key in OF_LOSSES if key not in LOSSES[loss]]
        yield True, [f"algorithm.{key}" for key in unread], f"with algorithm.policy_loss = {loss}"
    normed = algorithm.aggregation == "seq-mean-token-sum-norm"
    yield not normed, ["algorithm.loss_scale_factor"], f"with algorithm.loss_agg_mode = {algorithm.aggregation}"
    yield algorithm.rollout_is == "none", ["algorithm.rollout_is_threshold"], "with algorithm.rollout_is = none"
    fixed = algorithm.kl_controller == "fixed"
    yield fixed, ["algorithm.kl_target", "algorithm.kl_horizon"], "with algorithm.kl_controller = fixed"
    no_kl = algorithm.kl_in == "none"
    yield (
        no_kl,
        [f"algorithm.kl_{key}" for key in ("coef", "estimator", "controller", "target", "horizon")],
        "with algorithm.kl_in = none",
    )
    yield no_kl, ["ref_model", "model_mapping.ref"], "with algorithm.kl_in = none: no reference model is built"
    yield model_of(config.reward) is None, ["model_mapping.reward"], f"with reward.kind = {config.reward.kind}"
    dtype = config.fsdp_of("ref").mixed_precision.param_dtype or reference.torch_dtype
    yield (
        not no_kl
        and ((dtype or config.model.torch_dtype) == "float32" or dtype == "float16" or (dtype is not None and not on_gpu)),
        ["ref_model.disable_half_cast"],
        f"where the reference computes in {dtype or 'float32'} anyway",
    )
    for role in config.roles():
        section, own = _section(role), config.fsdp_of(role).mixed_precision.param_dtype
        named = own is not None and not isinstance(config.reward, WeightedReward)
        yield named, [f"{section}.torch_dtype"], f"beside mixed_precision.param_dtype = {own}"
    for name, trained in (("actor", config.actor), ("critic", config.critic)):
        still = trained.learning_rate == 0
        yield still, [f"{name}.{key}" for key in (*ADAMW, *SCHEDULE)], f"with {name}.learning_rate = 0"
        constant = trained.lr_scheduler_type == "constant" and not still
        yield constant, [f"{name}.min_lr_ratio"], "with lr_scheduler_type = constant"
    yield config.evaluation.temperature == 0, ["evaluation.seed"], "with evaluation.temperature = 0"


def _fsdp_cases(config: Config, role: Role, fsdp: FsdpConfig, ranks: int, on_gpu: bool) -> Iterator[Case]:
    wrap, strategy = fsdp.wrap_policy.auto_wrap, fsdp.strategy
    yield strategy != "hsdp", ["hsdp_group_size"], f"with strategy = {strategy}"
    yield wrap == "NO_WRAP", [CLASSES, LEAST, "forward_prefetch"], "with NO_WRAP: the whole model is one unit"
    yield wrap == "SIZE_BASED_WRAP", [CLASSES], "with SIZE_BASED_WRAP"
    whole = strategy in ("single", "ddp") or _size(config, role, ranks) == 1
    yield whole and wrap != "NO_WRAP", ["forward_prefetch"], "where each rank holds the whole model: nothing is gathered"
    yield not on_gpu, OFFLOADS, "on a CPU"
    exact = config.dtype_of(role) == "float32"
    yield exact, ["mixed_precision.cast_forward_inputs"], "where the model computes in float32"


def _fsdp(config: Config, ranks: int, on_gpu: bool) -> Iterator[str]:
    """For each key under the section in which it is given: in a role's own, or in `fsdp` if no role makes use of it."""
    roles, idle = config.roles(), {}
    for role in roles:
        fsdp, own = config.fsdp_of(role), config.role(role).fsdp.model_dump()
        cases = list(_fsdp_cases(config, role, fsdp, ranks, on_gpu))
        if role in ("ref", "reward"):
            cases.append((True, [key for key in TRAINING_ONLY if _within(own, key)], "on a model that is not trained"))
        reasons = {key: because for given, keys, because in cases for key in keys if given and _changed(fsdp, key)}
        yield from (
            f"{_section(role)}.fsdp.{key} has no effect {because}" for key, because in reasons.items() if _within(own, key)
        )
        idle[role] = reasons
    for key in _leaves(FsdpConfig().model_dump()):
        inherit = [role for role in roles if not _within(config.role(role).fsdp.model_dump(), key)]
        if not _changed(config.fsdp, key):
            continue
        if not inherit:
            yield f"fsdp.{key} has no effect: every role sets its own"
        elif all(key in idle[role] for role in inherit):
            yield f"fsdp.{key} has no effect {idle[inherit[0]][key]}"


def _section(role: Role) -> str:
    return "ref_model" if role == "ref" else role


def _size(config: Config, role: Role, ranks: int) -> int:
    mapped = getattr(config.model_mapping, role)
    if role == "ref" and mapped is None:
        mapped = config.model_mapping.actor
    return ranks if mapped is None else len(mapped)


def _responses(config: Config) -> int | None:
    return None if config.trainer.gradient_accumulation_steps is not None else config.samples_per_step


def _value(section: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        section = getattr(section, name)
    return section


def _changed(fsdp: FsdpConfig, key: str) -> bool:
    return _value(fsdp, key) != _value(FsdpConfig(), key)


def _within(values: dict[str, Any], dotted: str) -> bool:
    name, _, rest = dotted.partition(".")
    return name in values and (not rest or _within(values[name], rest))


def _leaves(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield from _leaves(value, f"{above}{name}.") if isinstance(value, dict) else [f"{above}{name}"]
