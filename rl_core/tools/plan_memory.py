"""Bytes on each rank's GPU in each phase of a PPO step, as `torch.cuda.max_memory_allocated` counts them.

A phase holds what its roles and the others have on the device (`_resident`), and what it needs itself: gathered units of FSDP,
gradients, activations. Which of these there are at one time follows `rl_core.ppo`, `learner`, `updates` and `models.offload`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rl_core.batching import BatchPlan
from rl_core.config.schema import Role
from rl_core.groups import ranks_of
from rl_core.optimizers import CHUNK_ELEMENTS
from rl_core.tools.plan_models import rollout_bytes, scoring_peak, update_trace
from rl_core.tools.plan_roles import FLOAT32, Held, Situation, held

PARTS = (
    "parameters", "optimizer", "rollout_weights", "gathered", "gradients", "activations", "logits_and_temporary", "kv_cache",
    "workspaces",
)  # fmt: skip
WORKSPACES = 72 * 2**20
"""cuBLAS keeps on a Hopper GPU 32 MiB for each thread that multiplies (forward and backward), and some for cuBLASLt."""


@dataclass(frozen=True)
class Phase:
    """The most that a phase takes on a rank, by what it is for."""

    name: str
    role: Role | None
    bytes: dict[str, int] = field(hash=False)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.bytes.values())


def phases(situation: Situation) -> list[list[Phase]]:
    """The phases of each rank that differs from the others in its roles, in the order of a step."""
    config = situation.config
    where = {role: set(ranks_of(config, role, situation.ranks)) for role in situation.roles}
    kinds = {tuple(role for role in situation.roles if rank in where[role]) for rank in range(situation.ranks)}
    return [_phases_of(situation, [held(situation, role) for role in roles]) for roles in sorted(kinds)]


def _phases_of(situation: Situation, roles: list[Held]) -> list[Phase]:
    here = {each.role: each for each in roles}
    engine = here["actor"].whole * here["actor"].itemsize if "actor" in here else 0
    result = [_building(here, engine)]

    def add(name: str, role: Role | None, working: dict[str, int], **resident: Iterable[Role]) -> None:
        total = _resident(here, engine, **resident)
        for part, size in working.items():
            total[part] += size
        result.append(Phase(name, role, total))

    for role, each in here.items():
        if each.eight_bit:  # its moments are made in float32, then packed
            add("trying the largest batch", role, {"optimizer": each.whole_moments}, loaded=[role])
    if "actor" in here:
        add("sync_weights", "actor", {"logits_and_temporary": _syncing(here["actor"])}, loaded=["actor"])
        cache, most = _rollout(situation, here["actor"])
        add("gen", None, {"kv_cache": cache, "logits_and_temporary": most - cache})
    names: dict[Role, str] = {"reward": "reward", "actor": "old_log_prob", "ref": "ref", "critic": "values"}
    done: list[Role] = []
    for role, name in names.items():
        if role in here:
            add(name, role, _scoring(situation, here[role]), loaded=[role], gathered=done)
            done.append(role)
    for role, each in sorted(here.items(), reverse=True):
        if each.part.trained:  # the critic's update comes before the actor's, and ends with its units freed
            gathered = [other for other in done if other not in (role, "critic")]
            most_of_all = max(_updating(situation, each), key=lambda working: sum(working.values()))
            add(f"update_{role}", role, most_of_all, loaded=[role], moments=[role], gathered=gathered)
    trained = [each for each in here.values() if each.part.trained]
    unpacked = sum(each.whole_moments - each.moments for each in trained if not each.fsdp.offload_policy)
    names_ = [each.role for each in trained]
    add("save", None, {"optimizer": unpacked}, loaded=names_, moments=names_)
    return result


def _resident(
    here: dict[Role, Held],
    engine: int,
    loaded: Iterable[Role] = (),
    moments: Iterable[Role] = (),
    gathered: Iterable[Role] = (),
) -> dict[str, int]:
    """What is on the device whatever the phase does: engine, and roles unless they wait in host memory."""
    total = dict.fromkeys(PARTS, 0) | {"rollout_weights": engine, "workspaces": WORKSPACES}
    for role, each in here.items():
        if each.fsdp.offload_policy:
            continue
        if role in loaded or not each.fsdp.param_offload:
            total["parameters"] += each.parameters
            if role in gathered and not each.fsdp.reshard_after_forward:  # since its last forward
                total["gathered"] += each.sizes.all * each.itemsize
        if each.part.trained and (role in moments or not each.fsdp.optimizer_offload):
            total["optimizer"] += each.moments
    return total


def _building(here: dict[Role, Held], engine: int) -> Phase:
    """One after the other; what is offloaded leaves the device when it is whole."""
    resident = _resident(here, engine) | {"optimizer": 0}
    waiting = [each.parameters for each in here.values() if each.fsdp.param_offload and not each.fsdp.offload_policy]
    resident["parameters"] += max(waiting, default=0)
    return Phase("building the models", None, resident)


def _syncing(actor: Held) -> int:
    """One tensor at a time: gathered in the engine's type; of an adapted one base, update and sum in float32."""
    whole = actor.sizes.largest * actor.itemsize * 2
    return max(whole, actor.sizes.adapted * (actor.itemsize + 3 * FLOAT32))


def _rollout(situation: Situation, actor: Held) -> tuple[int, int]:
    """(KV cache, most of all), beside the engine's weights. This is where the engine's way of generating counts."""
    config = situation.config
    prompts = BatchPlan.of(config).prompts
    here = math.ceil(prompts / actor.size) * config.rollout.n
    rows = min(config.rollout.batch_size, here)
    return rollout_bytes(actor.part.model, actor.part.dtype, rows, situation.prompt, config.rollout.max_new_tokens)


def _portion(situation: Situation, each: Held) -> tuple[int, int, int, int]:
    """The largest micro-batch on a rank, (rows, prompt, response), and how many make up a mini-batch. Where ranks share a
    sequence, a rank has its part of the positions, of which all may be the response's."""
    plan, response = BatchPlan.of(situation.config), situation.config.rollout.max_new_tokens
    mine = math.ceil(plan.mini_batch / each.data_parallel)
    length = situation.prompt + response
    rows = plan.micro_batch if plan.micro_tokens is None else max(1, plan.micro_tokens // length)
    rows = min(rows, mine)
    share = math.ceil(length / each.sequence)
    answered = min(response, share - 1)
    return rows, share - answered, answered, math.ceil(mine / rows)


def _scoring(situation: Situation, each: Held) -> dict[str, int]:
    rows, prompt, response, _ = _portion(situation, each)
    return {"gathered": each.gathered, "logits_and_temporary": scoring_peak(each.part.frozen, rows, prompt, response)}


def _updating(situation: Situation, each: Held) -> list[dict[str, int]]:
    """What there is beside the resident at the moments of an update that may be its worst."""
    rows, prompt, response, micro_batches = _portion(situation, each)
    trace = update_trace(each.part, rows, prompt, response)
    on_device = not each.fsdp.offload_policy
    sharded = each.trained_itemsize / each.shards if on_device else 0.0
    # Until the last micro-batch gradients are summed without the other ranks: whole, on the device even with offload_policy.
    summed = each.sizes.trained * each.reduce_itemsize if micro_batches > 1 else 0
    moments = []
    for made, live in trace.most:
        gradients = max(summed, int(made * sharded)) if summed else int(made * sharded)
        kept = min(trace.kept, live)
        moments.append(
            {
                "gathered": each.gathered,
                "gradients": gradients + (each.reducing if made else 0),
                "activations": kept,
                "logits_and_temporary": live - kept,
            }
        )
    if micro_batches > 1:  # the results of one micro-batch are there until the next has its own
        temporary = trace.forward - trace.kept + trace.after
        moments.append(
            {"gathered": each.gathered, "gradients": summed, "activations": trace.kept, "logits_and_temporary": temporary}
        )
    step = trace.after + (_packing(each) if on_device else 0)
    moments.append({"gradients": int(each.sizes.trained * sharded), "logits_and_temporary": step})
    return moments


def _packing(each: Held) -> int:
    """Of the optimizer's step: the fused AdamW needs nothing, the 8-bit one works on chunks in float32."""
    if not each.eight_bit:
        return 0
    return 7 * FLOAT32 * min(CHUNK_ELEMENTS, each.sizes.largest // each.shards)
