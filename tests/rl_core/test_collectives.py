"""What ranks wait for: gradients are summed once per optimizer step, actor and critic apart do not wait, an error stops all."""

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks, started
from tests.rl_core import tiny_runs
from tests.rl_core.tiny_runs import built

inputs = tiny_runs.inputs
QUICK = {"rollout.max_new_tokens": 3, "algorithm.kl_in": "none"}
EIGHT = QUICK | {"trainer.train_batch_size": 4, "trainer.ppo_mini_batch_size": 8}
"""Responses of a mini-batch."""
SPREAD: dict[str, dict[str, Any]] = {
    "kept gathered": {"fsdp.reshard_after_forward": False},
    "ddp": {"fsdp.strategy": "ddp"},
}
LIMIT_SECONDS = 60.0


def around_updates(before: Callable[[str], None], after: Callable[[str], None]) -> None:
    """Let the loop of this process call these with `actor` or `critic` around each update of one."""
    from rl_core import ppo

    def around(role: str, update: Callable[..., None]) -> Callable[..., None]:
        def called(learner: Any, *args: Any) -> None:
            if learner.module is not None:
                before(role)
            update(learner, *args)
            if learner.module is not None:
                after(role)

        return called

    ppo.update_actor, ppo.update_critic = around("actor", ppo.update_actor), around("critic", ppo.update_critic)


class Collectives(TorchDispatchMode):
    """Counts the collectives of a block by their operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does comes by again
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(rank: int, directory: Path) -> dict[tuple[str, int], dict[str, Counter[str]]]:
    """By strategy and responses of a micro-batch the collectives of an update of actor and of critic."""
    from rl_core.ppo import train

    counting: dict[str, Collectives] = {}

    def before(role: str) -> None:
        counting[role] = Collectives()
        counting[role].__enter__()

    around_updates(before, lambda role: counting[role].__exit__(None, None, None))
    done = {}
    for name, overrides in SPREAD.items():
        for responses in (4, 1):
            settings = EIGHT | overrides | {"trainer.per_device_train_batch_size": responses}
            train(built(rank, directory, f"counted-{name}-{responses}", settings))
            done[name, responses] = {role: counted.counts for role, counted in counting.items()}
    return done


def test_gradients_are_summed_once_per_optimizer_step_however_many_micro_batches_there_are(inputs: Path) -> None:
    for done in run_ranks(count_collectives, 2, inputs):
        for name, role in [(name, role) for name in SPREAD for role in ("actor", "critic")]:
            one, four = (done[name, responses][role] for responses in (4, 1))
            sums = {operation: count for operation, count in one.items() if "reduce" in operation}
            assert sum(sums.values()) > 2, f"{name}, {role}: of a unit for each layer and of the rest"
            assert {operation: four[operation] for operation in four if "reduce" in operation} == sums, f"{name}, {role}"
            if name == "kept gathered":
                assert four == one, "parameters are not gathered again for each micro-batch"


def hold(rank: int, directory: Path) -> list[list[str]]:
    """Steps of an actor on two ranks and a critic on a third: in the first the critic's updates are held until the actor has
    done all of its, in the second the other way round.

    Returns:
        Of each step this rank's updates.
    """
    from rl_core.ppo import train

    store = dist.FileStore(str(directory / "held"), dist.get_world_size())
    store.set_timeout(timedelta(seconds=LIMIT_SECONDS))
    ranks, mine = {"actor": [0, 1], "critic": [2]}, []

    def before(role: str) -> None:
        if role == held:
            store.wait([f"{other} is done" for name, on in ranks.items() if name != held for other in on])

    def after(role: str) -> None:
        mine[-1].append(role)
        if role != held and len(mine[-1]) == 2:
            store.set(f"{rank} is done", "")

    around_updates(before, after)
    mapping = {f"model_mapping.{role}": on for role, on in ranks.items()}
    for held in ("critic", "actor"):
        mine.append([])
        train(built(rank, directory, f"held-{held}", QUICK | mapping))
    return mine


def test_actor_and_critic_on_ranks_of_their_own_do_not_wait_for_each_other(inputs: Path) -> None:
    assert run_ranks(hold, 3, inputs) == [[["actor"] * 2] * 2] * 2 + [[["critic"] * 2] * 2]


def build_one_wrong(rank: int, directory: Path) -> None:
    wrong = {"fsdp.wrap_policy.transformer_layer_cls_to_wrap": ["NoSuchLayer"]} if rank == 1 else {}
    built(rank, directory, "wrong", wrong)


def by_themselves(function: Callable[..., None], world_size: int, scratch: Path, *args: Any) -> list[str]:
    """The tracebacks with which ranks end that nobody ends, by rank."""
    ranks = started(function, world_size, scratch, *args)
    try:
        until = time.monotonic() + LIMIT_SECONDS
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
        assert not [rank for rank, process in enumerate(ranks) if process.is_alive()], "these ranks have not ended"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [(scratch / f"{rank}.error").read_text() for rank in range(world_size)]


def test_an_error_of_one_rank_while_models_are_built_is_what_it_reports_and_ends_the_others(inputs: Path, tmp_path: Path) -> None:
    other, failing = by_themselves(build_one_wrong, 2, tmp_path, inputs)
    expected = "rl_core.errors.ConfigError: fsdp.wrap_policy.transformer_layer_cls_to_wrap: NoSuchLayer does not occur"
    assert failing.strip().splitlines()[-1].startswith(expected)
    assert "NoSuchLayer" not in other, "it ended for want of the other rank"
