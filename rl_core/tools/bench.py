"""Real PPO steps of a configuration, timed: seconds per phase, tokens/s, MFU, memory. What one rank runs:

    torchrun --nproc_per_node=N -m rl_core.tools.bench --config_path X.yaml --work DIR --out FILE.json [--set key=value]…

The loop is `rl_core.ppo.train`, the models are those of `rl_core.train.build`. Every prompt and every response has the greatest
length, the reward is a number that takes no time (but a reward model judges as it would), and nothing is saved. With
`--random_weights` config.json is all that is needed of the model. `ppoflow bench step` calls this once for each case, so that
one case's lack of memory is not another's.
"""

# ruff: noqa: E402 – as in rl_core.train
from rl_core.entry import require_libraries, run_program
from rl_core.process import die_with_parent

die_with_parent()
require_libraries()

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from rl_core import memory, stall
from rl_core.artifacts import Artifact
from rl_core.batching import BatchPlan
from rl_core.config import Config, load_config
from rl_core.config.reward import FunctionReward, model_of
from rl_core.digests import digest_json
from rl_core.distributed import World, joined
from rl_core.inputs import prepare
from rl_core.learner import Learner
from rl_core.models.auto import model_config
from rl_core.models.dtypes import usable_dtype
from rl_core.models.lora import is_adapter
from rl_core.ppo import Run, train
from rl_core.together import together
from rl_core.tools import bench_inputs, bench_reward
from rl_core.tools.bench_flops import FORMULA, Geometry, flops, geometry, matmul_speed
from rl_core.train import build

KEPT = ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "prompt_length/mean", "response_length/min")


class Unsaved(Run):
    """Checkpoints of such models are larger than some disks."""

    def save(self, steps_done: int) -> None:
        """Nothing."""


def main(arguments: Sequence[str]) -> None:
    """Measure as the command line says; rank 0 writes the result."""
    parser = argparse.ArgumentParser(prog="rl_core.tools.bench", description="One rank of a bench; start it with torchrun.")
    parser.add_argument("--config_path", type=Path, required=True, help="the configuration (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the configuration")
    parser.add_argument("--work", type=Path, required=True, help="directory for prompts and base model, kept for the next case")
    parser.add_argument("--out", type=Path, required=True, help="the result (JSON)")
    parser.add_argument("--steps", type=int, default=2, help="steps measured")
    parser.add_argument("--warm", type=int, default=1, help="steps before them")
    parser.add_argument("--prompt_tokens", type=int, help="length of the prompts (default: data.max_prompt_length)")
    parser.add_argument("--random_weights", action="store_true", help="values of no meaning; only config.json is read")
    options = parser.parse_args(arguments)

    config = load_config(options.config_path, options.set)
    with ExitStack() as stack:
        world = stack.enter_context(joined(config.launch))
        stack.enter_context(stall.watch(world, config.launch))
        config = as_benched(config.settled(world.size), options.warm + options.steps)
        tokens = options.prompt_tokens or config.data.max_prompt_length
        result = measure(config, options.work.absolute(), world, options.warm, tokens, options.random_weights)
        if world.is_main:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def as_benched(config: Config, steps: int) -> Config:
    """The settled configuration with so many steps, each of which does all phases, and without what is not measured."""
    own = FunctionReward(kind="function", path=str(bench_reward.__file__), timeout_s=None)
    return config.model_copy(
        update={
            "reward": model_of(config.reward) or own,
            "trainer": config.trainer.model_copy(update={"max_steps": steps, "logger": ()}),
            "algorithm": config.algorithm.model_copy(update={"critic_warmup": 0}),
            "evaluation": config.evaluation.model_copy(update={"every_steps": 0, "max_new_tokens": None}),
        }
    )


def measure(config: Config, work: Path, world: World, warm: int, prompt_tokens: int, random: bool) -> dict[str, Any]:
    """Run the steps of `config` and say how long they took on average, `warm` first ones left out. Collective.

    Args:
        work: a directory that all ranks see; the base model in it is used again.

    Returns:
        On rank 0 what `ppoflow bench step` shows of a case, {} elsewhere. Seconds by phase are those of the slowest rank;
        FLOPs and MFU as in `rl_core.tools.bench_flops`; GiB are of the rank that needs most: on a GPU what torch allocated, else
        the process.
    """
    plan, on_gpu = BatchPlan.of(config), world.device.type == "cuda"
    speeds = world.gather(matmul_speed(usable_dtype(config, "actor", world.device), world.device))
    dataset, base = inputs(config, work, world, plan, prompt_tokens, random)
    output = work / "run"
    together(lambda: _empty(output) if world.is_main else None)
    with bench_inputs.for_a_bench(random), stall.phase("building the models"):
        run = Unsaved(**vars(build(config, dataset, base, output, world, stopping=lambda: False)))
    run.stop_ids = set()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    built = torch.cuda.memory_allocated() if on_gpu else memory.peak()
    train(run)
    parts = world.gather((built, memory.peak(), _adapters(run.actor), _adapters(run.critic)))
    if not world.is_main:
        return {}
    built, peak, *adapters = map(max, zip(*parts, strict=True))
    rows = bench_inputs.read_results(output / "metrics.jsonl")[warm:]
    return {
        "ranks": world.size,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **_batches(run, prompt_tokens),
        **_speed(run, rows, geometry(base.path, config.model, *adapters), prompt_tokens, sum(speeds)),
        "gib_built": round(built / 2**30, 3),
        "gib_peak": round(peak / 2**30, 3),
        "formula": FORMULA,
        "metrics_of_last_step": {name: rows[-1].get(name) for name in KEPT},
    }


def _batches(run: Run, prompt_tokens: int) -> dict[str, Any]:
    plan = run.plan
    per_rank = math.ceil(plan.mini_batch / run.actor.group.data_parallel)
    micro = min(plan.micro_batch, per_rank)
    by_rows = plan.micro_tokens is None
    return {
        "responses": plan.responses,
        "prompt_tokens": prompt_tokens,
        "response_tokens": run.config.rollout.max_new_tokens,
        "mini_batch": plan.mini_batch,
        "micro_batch": micro if by_rows else f"≤ {plan.micro_tokens} tokens",
        "accumulation": math.ceil(per_rank / micro) if by_rows else None,
    }


def _speed(run: Run, rows: list[dict[str, Any]], shape: Geometry, prompt_tokens: int, peak: float) -> dict[str, Any]:
    """Means over the steps' metrics; `peak` is FLOP/s of all ranks together."""
    plan, rollout, size = run.plan, run.config.rollout, run.world.size
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if name.startswith(("timing_s/", "perf/"))}
    seconds = {name.removeprefix("timing_s/"): value for name, value in mean.items() if name.startswith("timing_s/")}
    counted = flops(shape, plan.prompts, rollout.n, prompt_tokens, rollout.max_new_tokens, plan.ppo_epochs)
    absent = {"values", "update_critic"} if run.critic is None else set()
    absent |= {"ref"} if run.reference is None else set()
    done = {name: count for name, count in counted.items() if name in seconds.keys() - absent}
    done["step"] = sum(done.values())
    tokens = mean["perf/total_num_tokens"]
    return {
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "seconds_of_steps": [round(row["timing_s/step"], 4) for row in rows],
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / seconds["step"],
        "tokens_per_s_per_rank": tokens / seconds["step"] / size,
        "parameters": {"matrices": shape.backbone, "head": shape.head, "adapters": shape.adapters},
        "tflop": {name: count / 1e12 for name, count in done.items()},
        "matmul_tflops_per_rank": peak / size / 1e12,
        "mfu": {name: count / seconds[name] / peak for name, count in done.items()},
    }


def inputs(
    config: Config, work: Path, world: World, plan: BatchPlan, prompt_tokens: int, random: bool
) -> tuple[Artifact, Artifact]:
    """Prompts of random ids and the base model, made by rank 0 where they are not there yet. Collective."""
    place = work / digest_json(config.model.model_dump(mode="json"))[:12]  # the next case may be of another model
    base, dataset = place / "shape", place / f"prompts-{plan.prompts}-{prompt_tokens}"

    def make() -> None:
        if not dataset.exists():
            found = bench_inputs.described(config.model)
            vocabulary = model_config(found.directory, found.trusted, gguf=found.gguf).get_text_config().vocab_size
            bench_inputs.write_prompts(dataset, plan.prompts, prompt_tokens, vocabulary)
        if random and not base.exists():
            bench_inputs.write_shape(base, config.model)

    together(lambda: make() if world.is_main else None)
    return prepare(dataset, base if random else None, config, place, world)


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()


def _adapters(learner: Learner | None) -> int:
    if learner is None or learner.module is None:
        return 0
    return sum(parameter.numel() for name, parameter in learner.module.named_parameters() if is_adapter(name))


if __name__ == "__main__":
    run_program(main)
