"""The largest batch is tried before the first step, and leaves no trace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.rl_core.tiny_runs import built, inputs  # noqa: F401 – a fixture

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a token budget, 8 bits, two ranks a sequence": {
        "trainer.max_tokens_per_micro_batch": 64, "actor.optimizer": "adamw8bit", "fsdp.ulysses_sequence_parallel_size": 2,
    },
    "roles apart": {"model_mapping.actor": [1], "model_mapping.critic": [0]},
}  # fmt: skip


def trained(rank: int, directory: Path) -> list[tuple[list[int], bool]]:
    """Of each case the rows of the batches that the models saw when it was tried, and whether the run is the one without."""
    from rl_core.dry_run import try_largest_batch
    from rl_core.models.local import local
    from rl_core.ppo import train

    seen = []
    for number, overrides in enumerate(CASES.values()):
        ends = []
        rows: list[int] = []
        for tried in (False, True):
            name = f"dry-{number}-{tried}"
            run = built(rank, directory, name, overrides)
            if tried:
                hooks = [
                    learner.module.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(len(given[0])))
                    for learner in (run.actor, run.critic)
                    if learner.module is not None
                ]
                try_largest_batch(run.learners, run.plan, prompt=7, response=8, config=run.config, device=run.world.device)
                for hook in hooks:
                    hook.remove()
                learners = [learner for learner in (run.actor, run.critic) if learner.module is not None]
                assert all(parameter.grad is None for learner in learners for parameter in learner.module.parameters())
            train(run)
            ends.append({name: local(tensor).clone() for name, tensor in run.tensors().items()})
        plain, after = ends
        seen.append((rows, plain.keys() == after.keys() and all(torch.equal(plain[name], after[name]) for name in plain)))
    return seen


@pytest.mark.usefixtures("inputs")
def test_it_is_as_large_as_any_that_can_come_and_changes_nothing(inputs: Path) -> None:  # noqa: F811
    by_rank = run_ranks(trained, 2, inputs)
    for plain, budget, apart in by_rank:
        assert plain == ([3, 3], True), "per_device_train_batch_size rows, actor and critic"
        assert budget == ([4, 4, 4, 4], True), "as many of 15 tokens as 64 hold; gradients of one wait for those of the other"
        assert apart == ([3, 3], True), "both micro-batches of the role that this rank has"
    assert json.dumps(by_rank[0]) == json.dumps(by_rank[1])
