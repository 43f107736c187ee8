"""What one rank of a training runs:

    torchrun --nproc_per_node=N -m rl_core.train --config_path X.yaml --output_dir RUN [--set key=value]…

does the whole training by itself: tokenizes, converts, trains, exports. With `--dataset` and `--base` it takes artifacts that
are made already (so `ppoflow run` calls it). Run again, it goes on from the last committed checkpoint under RUN.
"""

# ruff: noqa: E402 – a rank must be bound to its parent before it spends seconds on imports, and old libraries make these fail
from rl_core.entry import require_libraries, run_program
from rl_core.process import die_with_parent

die_with_parent()
require_libraries()

import argparse
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_core import stall
from rl_core.artifacts import Artifact, commit, fresh_scratch, open_artifact
from rl_core.batching import BatchPlan
from rl_core.checkpoint.deadline import Deadline
from rl_core.checkpoint.export import export_policy
from rl_core.checkpoint.room import at_once, check_room, learned_bytes, policy_bytes
from rl_core.checkpoint.saver import Saver
from rl_core.checkpoint.steps import Checkpoints
from rl_core.checks import check_can_go_on, check_enough_prompts, check_positions, check_token_ids
from rl_core.config import Config, load_config
from rl_core.config.effects import notes, without_effect
from rl_core.config.schema import Role as RoleName
from rl_core.data.prompts import Prompts
from rl_core.determinism import be_deterministic
from rl_core.digests import digest_json
from rl_core.distributed import World, joined, set_timeouts
from rl_core.dry_run import try_largest_batch
from rl_core.errors import BrokenArtifact, StoreError
from rl_core.groups import Group, make_groups
from rl_core.identity import training_identity
from rl_core.inputs import prepare
from rl_core.learner import Learner
from rl_core.locks import locked
from rl_core.metrics import RunLog
from rl_core.models.build import build_critic, build_policy
from rl_core.models.dtypes import usable_dtype
from rl_core.models.reward_model import build_reward_model, check_reward_model
from rl_core.models.source import load_tokenizer_dir
from rl_core.ppo import Run, train
from rl_core.rewards import build_reward, probe
from rl_core.role import Role
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.stop_ids import stop_ids_of
from rl_core.scoring import Scorer
from rl_core.together import together

PROBED_PROMPTS = 4


def main(arguments: Sequence[str]) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(prog="rl_core.train", description="One rank of a PPO training; start it with torchrun.")
    parser.add_argument("--config_path", type=Path, required=True, help="the configuration (YAML)")
    parser.add_argument("--output_dir", type=Path, required=True, help="run directory: checkpoints, metrics, exported policy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the configuration")
    parser.add_argument("--dataset", type=Path, help="tokenized prompts (default: made under output_dir)")
    parser.add_argument("--base", type=Path, help="converted base model (default: made under output_dir)")
    options = parser.parse_args(arguments)

    config = load_config(options.config_path, options.set)
    output = _writable(options.output_dir.absolute())
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the latter is what batch systems are often told to send before the end
        signal.signal(number, lambda number, frame: signals.append(number))
    with ExitStack() as stack:
        # Whoever starts after a crash waits, by taking this exclusively, until the last rank of the dead group is gone.
        stack.enter_context(locked(output / "ranks.lock", shared=True))
        world = stack.enter_context(joined(config.launch))
        stack.enter_context(stall.watch(world, config.launch))
        if world.is_main:
            for sentence in (*notes(config), *without_effect(config, world.size, world.device.type == "cuda")):
                print(f"Note: {sentence}.", flush=True)
        config = config.settled(world.size)
        if world.is_main:  # two trainings started by hand on one directory: the second waits
            stack.enter_context(locked(output / "training.lock", on_wait=lambda who: print(f"Waiting for {who}", flush=True)))
        with stall.phase("preparing the data and the base model"):
            dataset, base = prepare(options.dataset, options.base, config, output, world)
        with stall.phase("building the models"):
            run = build(config, dataset, base, output, world, stopping=lambda: bool(signals))
        try:
            train(run)
        except Exception:
            run.saver.let_finish()
            raise
        with stall.phase("exporting the policy"):
            together(lambda: export(run, base, output) if world.is_main else None)


def build(config: Config, dataset: Artifact, base: Artifact, output: Path, world: World, stopping: Callable[[], bool]) -> Run:
    """Check what can be checked before models load, then build them and go on from the last checkpoint, if any."""
    be_deterministic(config.trainer.deterministic)
    deadline = Deadline(config.checkpoint.must_save_by, os.environ)
    plan, trusted = BatchPlan.of(config), config.model.trust_remote_code
    prompts, eval_prompts = Prompts(dataset.path, "train"), Prompts(dataset.path, "eval")
    tokenizer = load_tokenizer_dir(base.path, trusted)
    reward = build_reward(config.reward, config.data.answer_column)
    if reward is not None:
        function = reward
        together(lambda: probe(function, [prompts[i] for i in range(min(PROBED_PROMPTS, len(prompts)))]))
    if "reward" in config.roles():
        together(lambda: check_reward_model(config, world.device, tokenizer))
    checkpoints = Checkpoints(
        output / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best, process_group=dist.new_group(backend="gloo")
    )
    latest = checkpoints.latest()
    total = config.total_steps(len(prompts))
    identity = training_identity(config, dataset.digest, base.digest)
    key = digest_json(identity)
    check_can_go_on(latest, key, identity, total, output)
    check_positions(config, dataset, base)
    check_token_ids(config, [prompts, eval_prompts], base)
    check_enough_prompts(len(prompts), plan.prompts)
    groups = make_groups(config, config.roles(), world.device.type)
    set_timeouts(config.launch.dist_timeout_s)
    log = RunLog(output, world, total, latest.results["step"] if latest else 0, "console" in config.trainer.logger)
    log.line(plan.describe(groups["actor"].data_parallel))
    actor, critic, reference, judge, engine = _models(config, base, groups, world, tokenizer, total, plan)
    run = Run(
        config=config,
        world=world,
        plan=plan,
        prompts=prompts,
        eval_prompts=eval_prompts,
        tokenizer=tokenizer,
        stop_ids=stop_ids_of(base.path, tokenizer, trusted),
        score=Scorer(config, tokenizer, world, reward, judge),
        actor=actor,
        critic=critic,
        reference=reference,
        engine=engine,
        checkpoints=checkpoints,
        saver=Saver(checkpoints, config.checkpoint.async_save),
        deadline=deadline,
        stopping=stopping,
        total_steps=total,
        key=key,
        identity=identity,
        log=log,
        kl_coef=config.algorithm.kl_coef,
    )
    if latest is not None:
        run.restore(latest)
        run.log.line(f"Going on from {latest.path.name}: {run.first_step} of {total} steps are done")
    check_room_for(run)
    if world.device.type == "cuda":  # elsewhere memory is not so short, and time is
        longest, most = dataset.results["prompt_length"]["max"], config.rollout.max_new_tokens
        try_largest_batch(run.learners, plan, longest, most, config, world.device)
    return run


def _models(
    config: Config, base: Artifact, groups: dict[RoleName, Group], world: World, tokenizer: Any, steps: int, plan: BatchPlan
) -> tuple[Learner, Learner | None, Role | None, Role | None, RolloutEngine | None]:
    """Actor, critic, reference, reward model and rollout engine: what this rank has a part of, the others empty."""
    device = world.device

    def mine(name: RoleName, make: Callable[[Group], Any]) -> Any:
        return make(groups[name]) if groups[name].rank is not None else None

    def role(name: RoleName, make: Callable[[Group], Any]) -> Role | None:
        return Role(name, mine(name, make), groups[name], config, device) if name in groups else None

    def learner(name: RoleName, make: Callable[[Group], Any], steps: int) -> Learner:
        return Learner(name, mine(name, make), groups[name], config, device, steps * plan.optimizer_steps)

    critic = None
    if "critic" in groups:
        critic = learner("critic", lambda group: build_critic(base.path, config, group, device), steps)
    actor_steps = steps - config.actor_starts_at
    actor = learner("actor", lambda group: build_policy(base.path, config, "actor", group, device, trainable=True), actor_steps)
    return (
        actor,
        critic,
        role("ref", lambda group: build_policy(base.path, config, "ref", group, device, trainable=False)),
        role("reward", lambda group: build_reward_model(config, group, device, tokenizer)),
        mine("actor", lambda _: RolloutEngine(base.path, usable_dtype(config, "actor", device), device, config.model)),
    )


def check_room_for(run: Run) -> None:
    """Raises StoreError where the disk will not hold the checkpoints that are kept and the policy. Collective."""
    settings, directory = run.config.checkpoint, run.checkpoints.directory
    coming = -(-(run.total_steps - run.first_step) // settings.save_steps)
    count = at_once(settings.keep + (settings.keep_best is not None), len(run.checkpoints.steps()), coming)
    needed = count * learned_bytes(run.learners) + policy_bytes(run.actor)
    together(lambda: check_room(directory, needed, f"What the run will write ({count} checkpoint(s) and the policy)"))


def export(run: Run, base: Artifact, output: Path) -> None:
    """Write the policy of the last checkpoint in Hugging Face form, committed as `policy` in the run directory."""
    final, policy = open_artifact(run.checkpoints.path(run.total_steps)), output / "policy"
    if policy.exists():
        try:
            if open_artifact(policy).key == final.digest:
                return
        except BrokenArtifact as error:
            print(f"{error} It is exported again.", flush=True)
        shutil.rmtree(policy)
    scratch = fresh_scratch(policy)
    export_policy(
        final.path / "tensors", "actor.", base.path, scratch,
        lora=run.config.actor.lora, trust_remote_code=run.config.model.trust_remote_code,
    )  # fmt: skip
    commit(scratch, policy, kind="policy", key=final.digest, results={"step": run.total_steps})
    run.log.line(f"Policy of step {run.total_steps} exported to {policy}")


def _writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--output_dir: {directory} cannot be made ({error.strerror}). Give a directory that you own.") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(f"--output_dir: {directory} cannot be written to. Give a directory that you own.")
    return directory


if __name__ == "__main__":
    run_program(main)
