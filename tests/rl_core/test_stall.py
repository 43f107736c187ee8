"""Where ranks are, and the report of one that stays."""

import io
import json
import re
import threading
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rl_core import stall
from rl_core.config.trainer import LaunchConfig
from rl_core.distributed import World
from rl_core.stall import ENDED, Note, Reporter
from tests.ranks import run_ranks

LIMIT = 0.2
IN_REWARD = Note("reward of step 12", 7, 90.0, "node-b", "reward.py:3 judge < ppo.py:9 train", 1)
IN_UPDATE = Note("update_actor of step 12", 8, 60.0, "node-a", "wait.py:1 wait", 1)


def after(note: Note, seconds: float) -> Note:
    return replace(note, seconds=note.seconds + seconds, beat=note.beat + 1)


def test_report_names_ranks_phases_steps_and_stacks():
    ranks = {0: IN_UPDATE, 1: IN_REWARD, 2: IN_UPDATE}
    assert Reporter(100.0).report(ranks, 0.0) is None
    said = Reporter(100.0).report({rank: after(note, 20.0) for rank, note in ranks.items()}, 20.0)
    assert said == (
        "ppoflow: stalled: rank 1 on node-b has been in reward of step 12 for 110 s; "
        "ranks 0, 2 on node-a have been in update_actor of step 12 for 80 s\n"
        "  rank 1 at reward.py:3 judge < ppo.py:9 train"
    )


def test_one_report_for_a_stall():
    reporter, ranks = Reporter(100.0), {0: IN_UPDATE, 1: IN_REWARD}
    assert reporter.report({rank: after(note, 20.0) for rank, note in ranks.items()}, 20.0)
    later = {rank: after(note, 60.0) for rank, note in ranks.items()}  # now rank 0 has waited for too long as well
    assert reporter.report(later, 60.0) is None
    again = reporter.report({0: later[0], 1: replace(IN_REWARD, number=9, seconds=101.0, beat=5)}, 200.0)
    assert again
    assert again.startswith("ppoflow: stalled: rank 0")


def test_a_rank_that_says_nothing_more_is_counted_from_its_last_word():
    reporter = Reporter(100.0)
    assert reporter.report({0: after(IN_UPDATE, 0.0), 1: IN_REWARD}, 1000.0) is None
    said = reporter.report({0: after(IN_UPDATE, -50.0), 1: IN_REWARD}, 1060.0)
    assert said
    assert "rank 1 on node-b has been in reward of step 12 for 150 s" in said
    assert said.endswith("\n  rank 1 gave no sign of life for 60 s: stopped, or busy outside Python")


def test_a_rank_at_its_end_is_no_stall():
    assert Reporter(100.0).report({0: replace(IN_UPDATE, stay=ENDED, seconds=500.0)}, 0.0) is None


def test_a_phase_stays_noted_where_an_error_passed():
    with stall.phase("gen", 3):
        assert "in gen of step 3" in stall.where()
    assert "in what follows gen of step 3" in stall.where()
    with pytest.raises(ValueError, match="x"), stall.phase("reward", 3):
        raise ValueError("x")
    assert "in reward of step 3" in stall.where()


class Releasing(io.StringIO):
    """Standard output that lets the waiting rank go on as soon as a report stands in it."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if "stalled" in text:
            distributed_c10d._get_default_store().set("released", "")
        return written


def waits_for_a_report(rank: int) -> str:
    """Rank 1 stays in a phase until the report is out; rank 0 waits for it in a collective, as in a training."""
    world, store = World(rank, 2, torch.device("cpu")), distributed_c10d._get_default_store()
    while rank == 0 and json.loads(store.get("stall/1"))["seconds"] < 2 * LIMIT:
        pass  # rank 1 is the first that stalls, however fast either of them started
    launch = LaunchConfig(stall_report_s=LIMIT)
    with redirect_stdout(Releasing()) as said, stall.phase("reward" if rank else "gen", 12), stall.watch(world, launch):
        if rank == 1:
            store.wait(["released"])
        with stall.phase("update_actor", 12):
            dist.barrier()
        return said.getvalue()


def test_two_ranks_one_waits_for_the_other():
    first, second = run_ranks(waits_for_a_report, 2)
    assert second == ""  # rank 0 speaks for all
    line, *stacks = first.splitlines()
    place = r"rank 1 on \S+ has been in reward of step 12 for \d+ s"
    assert re.fullmatch(rf"ppoflow: stalled: .*{place}.*", line), first
    assert any(re.match(r"  rank 1 at .*tests/rl_core/test_stall\.py:\d+ waits_for_a_report", stack) for stack in stacks), first


def test_zero_reports_never():
    """Nor does it ask for a process group."""
    with stall.watch(World(0, 1, torch.device("cpu")), LaunchConfig(stall_report_s=0)):
        assert "stall" not in [thread.name for thread in threading.enumerate()]
