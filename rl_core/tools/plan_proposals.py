"""What to change so that a training fits: as few as will do of the known remedies, those first that cost least."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rl_core.errors import ConfigError
from rl_core.models.offload import layer_runner
from rl_core.tools.plan import Plan, changed, make_plan

MOST_RANKS = 64
RANKS = "GPUs"
SIZES = {"micro-batch", "rollout"}
"""Remedies whose one value may be doubled for as long as it fits."""
LORA = {"rank": 16, "alpha": 32.0}
TRAINED = ("actor", "critic")
Changes = dict[str, Any]


@dataclass(frozen=True)
class Proposal:
    """Changes with which it fits."""

    changes: Changes
    """Values of keys, and under `GPUs` how many there must be."""
    alters: bool
    """Whether another training comes out (adapters, 8-bit moments), and not only a slower one."""
    plan: Plan


def propose(plan: Plan) -> Proposal | None:
    """Take on, one after the other, activation checkpointing, the smallest micro-batches, the smallest rollout batches (where the
    rollout is what does not fit), optimizer offload, parameter offload, 8-bit moments, adapters, more GPUs, each if less is
    needed with it, until it fits. Then leave out again what turns out needless, and let batches be as large as they can. None:
    all of it is not enough."""
    taken: dict[str, Changes] = {}
    now, before = plan, 0
    while not now.fits and before != now.peak.total:
        before = now.peak.total
        for name, remedy in REMEDIES.items():
            while not now.fits and (more := remedy(now)):
                tried = _planned(plan, taken | {name: more})
                if tried is None or tried.peak.total >= now.peak.total:
                    break
                taken, now = taken | {name: more}, tried
    if not now.fits:
        return None
    for name in reversed(list(taken)):  # what costs most first
        fewer = {other: changes for other, changes in taken.items() if other != name}
        without = _planned(plan, fewer)
        if without is not None and without.fits:
            taken, now = fewer, without
    for name in SIZES & taken.keys():
        [(key, size)] = taken[name].items()
        while (larger := _planned(plan, taken | {name: {key: size * 2}})) is not None and larger.fits:
            taken, now, size = taken | {name: {key: size * 2}}, larger, size * 2
    changes = {key: value for each in taken.values() for key, value in each.items()}
    return Proposal(changes, not {"8-bit", "adapters"}.isdisjoint(taken), now)


def _planned(plan: Plan, taken: dict[str, Changes]) -> Plan | None:
    """The plan with these changes; None where they cannot be made."""
    changes = {key: value for each in taken.values() for key, value in each.items()}
    ranks = changes.pop(RANKS, None)
    try:
        return make_plan(changed(plan.situation, changes, ranks), plan.gpu_memory)
    except ConfigError:
        return None


def _checkpointing(plan: Plan) -> Changes | None:
    config = plan.situation.config
    kept = any(layer_runner(config.fsdp_of(role)) is None for role in config.roles() if role in TRAINED)
    return {"fsdp.activation_checkpointing": True} if kept else None


def _micro_batch(plan: Plan) -> Changes | None:
    trainer = plan.situation.config.trainer
    longest = plan.situation.prompt + plan.situation.config.rollout.max_new_tokens
    if trainer.max_tokens_per_micro_batch is not None:
        return {"trainer.max_tokens_per_micro_batch": longest} if longest < trainer.max_tokens_per_micro_batch else None
    return {"trainer.per_device_train_batch_size": 1} if trainer.per_device_train_batch_size > 1 else None


def _rollout(plan: Plan) -> Changes | None:
    return {"rollout.batch_size": 1} if plan.peak.name == "gen" and plan.situation.config.rollout.batch_size > 1 else None


def _offload(key: str) -> Callable[[Plan], Changes | None]:
    def remedy(plan: Plan) -> Changes | None:
        config = plan.situation.config
        waits = all(getattr(config.fsdp_of(role), key) or config.fsdp_of(role).offload_policy for role in config.roles())
        return None if waits else {f"fsdp.{key}": True}

    return remedy


def _eight_bit(plan: Plan) -> Changes | None:
    sections = _trained(plan, lambda role: role.optimizer != "adamw8bit")
    return {f"{section}.optimizer": "adamw8bit" for section in sections} or None


def _adapters(plan: Plan) -> Changes | None:
    if find_spec("peft") is None:
        return None
    return {f"{section}.lora": LORA for section in _trained(plan, lambda role: role.lora is None)} or None


def _more_gpus(plan: Plan) -> Changes | None:
    situation = plan.situation
    mapping = situation.config.model_mapping
    if situation.ranks >= MOST_RANKS or any(ranks is not None for ranks in mapping.model_dump().values()):
        return None
    ranks = situation.ranks * 2
    changes: Changes = {RANKS: ranks}
    if ranks <= 8:
        changes["launch.nproc_per_node"] = ranks
    if situation.config.fsdp.strategy in ("single", "ddp"):
        changes["fsdp.strategy"] = "fsdp"
    return changes


def _trained(plan: Plan, wanted: Callable[[Any], bool]) -> list[str]:
    config = plan.situation.config
    return [name for name in TRAINED if name in config.roles() and wanted(config.role(name))]  # type: ignore[arg-type]


REMEDIES: dict[str, Callable[[Plan], Changes | None]] = {
    "checkpointing": _checkpointing,
    "micro-batch": _micro_batch,
    "rollout": _rollout,
    "optimizer offload": _offload("optimizer_offload"),
    "parameter offload": _offload("param_offload"),
    "8-bit": _eight_bit,
    "adapters": _adapters,
    "GPUs": _more_gpus,
}
