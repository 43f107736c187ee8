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
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_core import stall
from rl_core.artifacts import Artifact, commit, fresh_scratch, open_artifact, set_aside
from rl_core.batching import BatchPlan
from rl_core.checkpoint.convert import convert
from rl_core.checkpoint.export import export_policy
from rl_core.checkpoint.steps import Checkpoints
from rl_core.config import Config, load_config
from rl_core.config.effects import notes, without_effect
from rl_core.config.schema import Role as RoleName
from rl_core.data.prompts import Prompts
from rl_core.data.sources import source_fingerprint
from rl_core.data.tokenize import tokenize
from rl_core.digests import digest_json
from rl_core.distributed import World, joined, set_timeouts
from rl_core.errors import BrokenArtifact, ConfigError, StoreError
from rl_core.groups import Group, make_groups
from rl_core.identity import training_identity
from rl_core.learner import Learner
from rl_core.locks import locked
from rl_core.metrics import RunLog
from rl_core.models.auto import model_config
from rl_core.models.build import build_critic, build_policy
from rl_core.models.dtypes import usable_dtype
from rl_core.models.reward_model import build_reward_model, check_reward_model
from rl_core.models.source import load_tokenizer, load_tokenizer_dir, model_fingerprint, resolve, tokenizer_fingerprint
from rl_core.ppo import Run, train
from rl_core.rewards import build_reward, probe
from rl_core.role import Role
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.stop_ids import stop_ids_of
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
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
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
            dataset, base = prepare(options, config, output, world)
        with stall.phase("building the models"):
            run = build(config, dataset, base, output, world, stopping=lambda: bool(signals))
        train(run)
        with stall.phase("exporting the policy"):
            together(lambda: export(run, base, output) if world.is_main else None)


def prepare(options: argparse.Namespace, config: Config, output: Path, world: World) -> tuple[Artifact, Artifact]:
    """The tokenized prompts and the converted base model: the given ones, else made by rank 0 under the run directory."""
    dataset, base = options.dataset or output / "dataset", options.base or output / "base"

    def make_missing() -> None:
        source = resolve(config.model)
        template = config.model.chat_template
        tokenizer = load_tokenizer(source, template)
        if not options.dataset:
            identity = [tokenizer_fingerprint(source, template), source_fingerprint(config.data), config.data.identity()]
            _make(dataset, identity, lambda scratch: tokenize(config.data, tokenizer, scratch))
        if not options.base:
            identity = [tokenizer_fingerprint(source, template), model_fingerprint(source)]
            _make(base, identity, lambda scratch: convert(source, tokenizer, scratch))

    if not (options.dataset and options.base):
        together(lambda: make_missing() if world.is_main else None)
    return open_artifact(dataset), open_artifact(base)


def build(config: Config, dataset: Artifact, base: Artifact, output: Path, world: World, stopping: Callable[[], bool]) -> Run:
    """Check what can be checked before models load, then build them and go on from the last checkpoint, if any."""
    plan, prompts, trusted = BatchPlan.of(config), Prompts(dataset.path, "train"), config.model.trust_remote_code
    tokenizer = load_tokenizer_dir(base.path, trusted)
    reward = build_reward(config.reward)
    if reward is not None:
        function = reward
        together(lambda: probe(function, [prompts[i] for i in range(min(PROBED_PROMPTS, len(prompts)))]))
    else:
        together(lambda: check_reward_model(config, world.device, tokenizer))
    checkpoints = Checkpoints(output / "checkpoints", config.checkpoint.keep)
    latest = checkpoints.latest()
    total = config.total_steps(len(prompts))
    key = digest_json(training_identity(config, dataset.digest, base.digest))
    _check_can_go_on(latest, key, total, output)
    _check_positions(config, dataset, base)
    if len(prompts) < plan.prompts:
        raise ConfigError(
            f"trainer.train_batch_size: {plan.prompts} prompts a step, but only {len(prompts)} training prompts. Lower it to "
            f"{len(prompts)} or less, or give more prompts."
        )
    groups = make_groups(config, config.roles(), world.device.type)
    set_timeouts(config.launch.dist_timeout_s)
    log = RunLog(output, world, total, latest.results["step"] if latest else 0, "console" in config.trainer.logger)
    log.line(plan.describe(groups["actor"].data_parallel))
    actor, critic, reference, judge, engine = _models(config, base, groups, world, tokenizer, total * plan.optimizer_steps)
    judged_by = judge or reward
    assert judged_by is not None, "a function, or else a model"
    run = Run(
        config=config,
        world=world,
        plan=plan,
        prompts=prompts,
        eval_prompts=Prompts(dataset.path, "eval"),
        tokenizer=tokenizer,
        stop_ids=stop_ids_of(base.path, tokenizer, trusted),
        reward=judged_by,
        actor=actor,
        critic=critic,
        reference=reference,
        engine=engine,
        checkpoints=checkpoints,
        stopping=stopping,
        total_steps=total,
        key=key,
        log=log,
    )
    if latest is not None:
        run.restore(latest)
        run.log.line(f"Going on from {latest.path.name}: {run.first_step} of {total} steps are done")
    return run


def _models(
    config: Config, base: Artifact, groups: dict[RoleName, Group], world: World, tokenizer: Any, optimizer_steps: int
) -> tuple[Learner, Learner, Role | None, Role | None, RolloutEngine | None]:
    """Actor, critic, reference, reward model and rollout engine: what this rank has a part of, the others empty."""
    device = world.device

    def mine(name: RoleName, make: Callable[[Group], Any]) -> Any:
        return make(groups[name]) if groups[name].rank is not None else None

    def role(name: RoleName, make: Callable[[Group], Any]) -> Role | None:
        return Role(name, mine(name, make), groups[name], config, device) if name in groups else None

    actor = mine("actor", lambda group: build_policy(base.path, config, "actor", group, device, trainable=True))
    critic = mine("critic", lambda group: build_critic(base.path, config, group, device))
    return (
        Learner("actor", actor, groups["actor"], config, device, optimizer_steps),
        Learner("critic", critic, groups["critic"], config, device, optimizer_steps),
        role("ref", lambda group: build_policy(base.path, config, "ref", group, device, trainable=False)),
        role("reward", lambda group: build_reward_model(config, group, device, tokenizer)),
        mine("actor", lambda _: RolloutEngine(base.path, usable_dtype(config, "actor", device), device, config.model)),
    )


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
    return directory


def _check_can_go_on(latest: Artifact | None, key: str, total: int, output: Path) -> None:
    if latest is None:
        return
    if latest.key != key:
        raise ConfigError(
            f"--output_dir {output} holds a run with another model, data, reward or algorithm than this configuration. "
            "Give each run a directory of its own."
        )
    if latest.results["step"] > total:
        raise ConfigError(
            f"trainer.max_steps: the run in {output} has {latest.results['step']} steps already, more than the {total} wanted. "
            "Raise it, or start over (ppoflow run --fresh, or another --output_dir)."
        )


def _check_positions(config: Config, dataset: Artifact, base: Artifact) -> None:
    """Refuse now what would end the run at the first rollout of the longest prompt."""
    longest, settings = dataset.results["prompt_length"]["max"], model_config(base.path, config.model.trust_remote_code)
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    for name, most in {"rollout": config.rollout.max_new_tokens, "evaluation": config.eval_max_new_tokens}.items():
        if positions is not None and longest + most > positions:
            raise ConfigError(
                f"{name}.max_new_tokens: {most} behind the longest prompt ({longest} tokens) is more than the {positions} "
                "positions of the model. Lower it, or data.max_prompt_length."
            )


def _make(path: Path, identity: Any, write: Callable[[Path], dict[str, Any]]) -> None:
    """Commit what `write` makes at `path`, unless the same is there already."""
    key = digest_json(identity)
    if path.exists():
        try:
            if open_artifact(path).key == key:
                return
            reason = f"{path} was made from other input; it is made again."
        except BrokenArtifact as error:
            reason = f"{error} It is set aside and made again."
        print(reason, flush=True)
        set_aside(path)
    print(f"Making {path}", flush=True)
    scratch = fresh_scratch(path)
    results = write(scratch)
    commit(scratch, path, kind=path.name, key=key, results=results)


if __name__ == "__main__":
    run_program(main)
