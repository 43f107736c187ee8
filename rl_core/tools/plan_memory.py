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
from rl_core.tools.plan_models import scoring_peak, update_trace
from rl_core.tools.plan_roles import FLOAT32, Held, Situation, held
from rl_core.tools.plan_rollout import Rollout, rollout_bytes

PARTS = (
    "parameters", "optimizer", "rollout_weights", "gathered", "gradients", "activations", "logits_and_temporary", "kv_cache",
    "workspaces",
)  # fmt: skip
BEFORE_STEPS = {"building the models", "going on", "largest batch"}
SCORING: dict[Role, str] = {"reward": "reward", "actor": "old_log_prob", "ref": "ref", "critic": "values"}
"""What each role's forward without gradients is called, in their order."""
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
    trained = [each for each in sorted(roles, key=lambda each: each.role, reverse=True) if each.part.trained]  # critic first
    rollout = _rollout(situation, here["actor"]) if "actor" in here else Rollout(0, 0, 0)
    engine = here["actor"].whole * here["actor"].itemsize if "actor" in here else 0
    result: list[Phase] = []

    def add(
        name: str,
        role: Role | None = None,
        working: dict[str, int] | None = None,
        loaded: Iterable[Role] = (),
        moments: Iterable[Role] = (),
        gathered: Iterable[Role] = (),
    ) -> None:
        total = dict.fromkeys(PARTS, 0) | {"rollout_weights": engine, "workspaces": WORKSPACES}
        if name not in BEFORE_STEPS:
            total["kv_cache"] = rollout.stays
        for each in roles:
            for part, size in _resident(each, each.role in loaded, each.role in moments, each.role in gathered).items():
                total[part] += size
        for part, size in (working or {}).items():
            total[part] += size
        result.append(Phase(name, role, total))

    waiting = [each.parameters for each in roles if each.fsdp.param_offload and not each.fsdp.offload_policy]
    made = -sum(_resident(each).get("optimizer", 0) for each in trained)  # there are no moments yet
    add("building the models", None, {"parameters": max(waiting, default=0), "optimizer": made})
    unpacked = sum(each.whole_moments - each.moments for each in trained if not each.fsdp.offload_policy)
    learners = [each.role for each in trained]
    add("going on", None, {"optimizer": unpacked}, loaded=learners, moments=learners)
    for each in trained:
        if each.eight_bit:  # its moments are made in float32, then packed
            add("largest batch", each.role, {"optimizer": each.whole_moments}, loaded=[each.role])
    if "actor" in here:
        add("sync_weights", "actor", {"logits_and_temporary": _syncing(here["actor"])}, loaded=["actor"])
        add("gen", None, {"kv_cache": rollout.cache - rollout.stays, "logits_and_temporary": rollout.working})
    done: list[Role] = []
    for role, name in SCORING.items():
        if role in here:
            add(name, role, _scoring(situation, here[role]), loaded=[role], gathered=done)
            done.append(role)
    for each in trained:  # the critic's update comes before the actor's, and ends with its units freed
        others = [role for role in done if role not in (each.role, "critic")]
        most = max(_updating(situation, each), key=lambda working: sum(working.values()))
        add(f"update_{each.role}", each.role, most, loaded=[each.role], moments=[each.role], gathered=others)
    here_packed = [each for each in trained if not (each.fsdp.optimizer_offload or each.fsdp.offload_policy)]
    add("save", None, {"optimizer": sum(each.whole_moments - each.moments for each in here_packed)})
    return result


def _resident(each: Held, loaded: bool = False, moments: bool = False, gathered: bool = False) -> dict[str, int]:
    """What a role has on the device whatever the phase does, unless it waits in host memory."""
    if each.fsdp.offload_policy:
        return {}
    total = {}
    if loaded or not each.fsdp.param_offload:
        total["parameters"] = each.parameters
        if gathered and not each.fsdp.reshard_after_forward:  # since its last forward
            total["gathered"] = each.sizes.all * each.itemsize
    if each.part.trained and (moments or not each.fsdp.optimizer_offload):
        total["optimizer"] = each.moments
    return total


def _syncing(actor: Held) -> int:
    """One tensor at a time: gathered in the engine's type; of an adapted one base, update and sum in float32."""
    whole = actor.sizes.largest * actor.itemsize * 2
    return max(whole, actor.sizes.adapted * (actor.itemsize + 3 * FLOAT32))


def _rollout(situation: Situation, actor: Held) -> Rollout:
    config = situation.config
    answers = config.rollout.n + config.algorithm.needs.greedy
    here = math.ceil(BatchPlan.of(config).prompts / actor.size) * answers
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
    charged = each.role == "actor" and situation.config.algorithm.entropy_coeff > 0
    trace = update_trace(each.part, rows, prompt, response, charged)
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
