"""Whether the models of a configuration can be trained, in minutes and before hours are spent:

    torchrun --nproc_per_node=N -m rl_core.tools.validate --config_path X.yaml [--set key=value]… [--json]

For each role – actor, critic, reference, reward model – four steps, each by the functions and on the ranks of a training: its
files load and fit each other, it is wrapped and its layers are units, its forward is finite, each trained parameter gets a
gradient. One role at a time is in memory, and nothing of it is kept. Exit code 0 if all is well, 2 if a step failed.

Not looked at: data, reward functions, whether the batch fits into memory.
"""

# ruff: noqa: E402 – as in rl_core.train
from rl_core.entry import require_libraries, run_program
from rl_core.process import die_with_parent

die_with_parent()
require_libraries()

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from rl_core import stall
from rl_core.config import Config, load_config
from rl_core.config.schema import Role as RoleName
from rl_core.distributed import World, joined, set_timeouts
from rl_core.errors import EXIT_USER
from rl_core.groups import make_groups
from rl_core.tools.validate_files import Files, find_files, scratch_directory
from rl_core.tools.validate_ranks import Ranks
from rl_core.tools.validate_report import STEPS, Report, Result, Step
from rl_core.tools.validate_steps import TRAINED, Trial


def main(arguments: Sequence[str]) -> None:
    """Validate as the command line says."""
    parser = argparse.ArgumentParser(
        prog="rl_core.tools.validate", description="One rank of a validation; start it with torchrun."
    )
    parser.add_argument("--config_path", type=Path, required=True, help="the configuration (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--report", type=Path, help="write the JSON document to this file, and print nothing")
    parser.add_argument("--origin", help="what the configuration is called in the report (default: its path)")
    options = parser.parse_args(arguments)

    config = load_config(options.config_path, options.set)
    with joined(config.launch) as world, stall.watch(world, config.launch):
        report = validate(config.settled(world.size), world, options.origin or str(options.config_path))
    if world.is_main:
        text = json.dumps(report.to_json(), indent=1)
        if options.report is not None:
            options.report.write_text(text, encoding="utf-8")
        else:
            print(text if options.json else "\n".join(report.lines()), flush=True)
    if not report.ok:
        sys.exit(EXIT_USER)


def validate(config: Config, world: World, origin: str) -> Report:
    """Try the steps of all roles. Collective; the same on all ranks.

    Args:
        config: settled.
        origin: what the configuration is called in the report.

    Raises:
        ConfigError: ranks and roles do not fit each other.
        ModelError: a step failed on this rank, and the others are stuck in it.
    """
    groups = make_groups(config, config.roles(), world.device.type)
    set_timeouts(config.launch.dist_timeout_s)
    ranks = Ranks(world, limit=config.launch.dist_timeout_s)
    report = Report(origin, world.size, str(world.device.type))
    with scratch_directory(world) as scratch:
        found: list[Files] = []

        def find() -> str:
            found.append(find_files(config, world, scratch))
            return ""

        with stall.phase("load"):
            base = ranks.attempt("load", find)
        report.notes += base.notes
        for name in config.roles():
            steps = STEPS if name in TRAINED else STEPS[:-1]
            if base.error is None:
                report.results += _try(
                    name, steps, Trial(name, config, found[0], groups[name], world.device), ranks, report.notes
                )
            elif name == "reward":  # it would need the policy's tokenizer
                report.results += [Result(name, step, "skip") for step in steps]
            else:
                report.results += [Result(name, "load", "fail", base.error), *(Result(name, step, "skip") for step in steps[1:])]
            _give_back()
    return report


def _try(name: RoleName, steps: Sequence[Step], trial: Trial, ranks: Ranks, notes: list[str]) -> Iterator[Result]:
    """The steps of a role; behind the first that fails none is tried."""
    failed = False
    for step in steps:
        if failed:
            yield Result(name, step, "skip")
            continue
        with stall.phase(f"{step} of the {name}"):
            tried = ranks.attempt(f"{step} of the {name}", partial(trial.call, step) if trial.takes_part else None)
        failed = tried.error is not None
        yield Result(name, step, "fail" if failed else "pass", tried.error or tried.found)
        notes += [note for note in tried.notes if note not in notes]


def _give_back() -> None:
    """A role's memory, before the next one needs it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_program(main)
