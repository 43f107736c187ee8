"""A plan as JSON, and as text for people."""

from collections.abc import Iterator
from typing import Any

from rl_core.batching import BatchPlan
from rl_core.tools.plan import GIB, Plan
from rl_core.tools.plan_memory import PARTS, Phase
from rl_core.tools.plan_proposals import RANKS, Proposal
from rl_core.tools.plan_roles import Held, held

HEADINGS = {
    "parameters": "weights", "optimizer": "optimizer", "rollout_weights": "rollout", "gathered": "gathered",
    "gradients": "gradients", "activations": "activations", "logits_and_temporary": "logits etc.", "kv_cache": "KV cache",
    "workspaces": "cuBLAS",
}  # fmt: skip


def document(plan: Plan, proposal: Proposal | None) -> dict[str, Any]:
    """JSON values; sizes in GiB."""
    situation = plan.situation
    return {
        "fits": plan.fits,
        "gpus": situation.ranks,
        "gpu_memory_gib": _gib(plan.gpu_memory),
        "usable_gib": _gib(plan.usable),
        "longest": {"prompt_tokens": situation.prompt, "response_tokens": situation.config.rollout.max_new_tokens},
        "peak": _phase(plan.peak),
        "models": {each.role: _model(each) for each in _held(plan)},
        "ranks": [[_phase(phase) for phase in rank] for rank in plan.ranks],
        "host_memory_gib": _gib(plan.host),
        "disk_gib": {"checkpoint": _gib(plan.checkpoint), "export": _gib(plan.export), "all": _gib(plan.disk)},
        "proposal": None if proposal is None else _proposal(proposal),
    }


def lines(plan: Plan, proposal: Proposal | None) -> Iterator[str]:
    """The phases in a table, then whether it fits and what would."""
    situation = plan.situation
    actor = held(situation, "actor")
    yield BatchPlan.of(situation.config).describe(actor.data_parallel)
    for each in _held(plan):
        kind = f"{each.sizes.trained:,} trained" if each.part.trained else "frozen"
        yield f"{each.role:<7}{each.sizes.all:>16,} parameters, {kind}, over {each.shards} GPU(s)"
    for rank in plan.ranks:
        yield from _table(rank)
    peak = plan.peak
    yield (
        f"{'Fits' if plan.fits else 'Does not fit'}: {peak.total / GIB:.1f} GiB in {_name(peak)}, of {plan.usable / GIB:.1f} "
        f"that tensors can have on a GPU of {plan.gpu_memory / GIB:.0f} GiB, with prompts of {situation.prompt} and responses of "
        f"{situation.config.rollout.max_new_tokens} tokens."
    )
    yield (
        f"Disk: {plan.disk / GIB:.1f} GiB (a checkpoint {plan.checkpoint / GIB:.1f}: {plan.checkpoints} at a time; "
        f"the exported policy {plan.export / GIB:.1f})."
    )
    if plan.host:
        yield f"Host memory: {plan.host / GIB:.1f} GiB on each host (what is offloaded, and a checkpoint while it is written)."
    if not plan.fits:
        yield _advice(proposal)


def _table(rank: list[Phase]) -> Iterator[str]:
    used = [part for part in PARTS if any(phase.bytes[part] for phase in rank)]
    wide = max(len(_name(phase)) for phase in rank)
    yield ""
    yield "  ".join([f"{'GiB on a GPU in':<{wide}}", *(HEADINGS[part] for part in used), "    all"])
    for phase in rank:
        cells = [(f"{phase.bytes[part] / GIB:.1f}" if phase.bytes[part] else "").rjust(len(HEADINGS[part])) for part in used]
        yield "  ".join([f"{_name(phase):<{wide}}", *cells, f"{phase.total / GIB:7.1f}"])
    yield ""


def _advice(proposal: Proposal | None) -> str:
    if proposal is None:
        return "No change of memory settings makes it fit: take a smaller model, shorter responses, or larger GPUs."
    settings = [f"{key}={_value(value)}" for key, value in proposal.changes.items() if key != RANKS]
    ranks = proposal.changes.get(RANKS)
    words = ([f"{ranks} GPUs"] if ranks else []) + ([f"--set {' --set '.join(map(repr, settings))}"] if settings else [])
    peak = proposal.plan.peak
    caution = " It is another training then: adapters or 8-bit moments change what comes out." if proposal.alters else ""
    return f"It fits with {' and '.join(words)}: {peak.total / GIB:.1f} GiB in {_name(peak)}.{caution}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _held(plan: Plan) -> list[Held]:
    return [held(plan.situation, role) for role in plan.situation.roles]


def _model(each: Held) -> dict[str, Any]:
    return {"parameters": each.sizes.all, "trained": each.sizes.trained, "gpus": each.shards, "gib": _gib(each.parameters)}


def _phase(phase: Phase) -> dict[str, Any]:
    sizes = {part: _gib(size) for part, size in phase.bytes.items() if size}
    return {"phase": phase.name, "role": phase.role, "gib": _gib(phase.total), "parts_gib": sizes}


def _proposal(proposal: Proposal) -> dict[str, Any]:
    changes = {key: value for key, value in proposal.changes.items() if key != RANKS}
    return {
        "set": changes,
        "gpus": proposal.plan.situation.ranks,
        "alters_the_result": proposal.alters,
        "peak": _phase(proposal.plan.peak),
        "host_memory_gib": _gib(proposal.plan.host),
    }


def _name(phase: Phase) -> str:
    return f"{phase.name} ({phase.role})" if phase.name == "largest batch" else phase.name


def _gib(size: int) -> float:
    return round(size / GIB, 2)
