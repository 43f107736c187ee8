"""Stage 3: PPO in a supervised torchrun child; the policy of its last step, with its metrics and its log.

Two identities. The *run* (`tasks.runs`) goes on from its checkpoints whatever code, libraries or number of ranks there are
now. The *artifact* is the policy after so many steps, and its key says under which circumstances which steps were made. A
policy that a run has once finished is found by run and number of steps, and never computed again.
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from rl_core.artifacts import Artifact
from rl_core.config import Config
from rl_core.config.fsdp import FsdpConfig
from rl_core.digests import digest_json, flatten
from rl_core.home import writable
from rl_core.locks import locked
from tasks.caching import stage_task
from tasks.devices import device_kind, rank_count
from tasks.progress import Listener, Progress, following
from tasks.runs import Run, Segment
from tasks.store import Key, Reference, Stage, find, library_versions, produce, reference_of
from tasks.torchrun import RanksCrashed, run_ranks
from tasks.tracking import Tracking, steps_logged

logger = logging.getLogger(__name__)

PROGRAM = "rl_core.train"
STAGE = Stage("train_policy", version=1, sources=("rl_core",), libraries=("torch", "transformers"))
COPIED = ("metrics.jsonl", "train.log", "config.yaml")
"""Beside the policy's own files, so that a finished run can be looked at without its directory. Equal policies have equal digests
whatever stands there."""


def key(config: Config, dataset: Reference, base: Reference) -> Key:
    """The key of the policy: the finished one where there is one, else the one that training now will have."""
    run = Run.of(config, dataset, base)
    finished = run.finished(STAGE.name)
    if finished is not None:
        return Key(STAGE.name, finished["key"], finished["components"])
    return _key_of(run, run.segments(circumstances(config)))


def _key_of(run: Run, segments: list[Segment]) -> Key:
    components = {
        "stage": STAGE.name,
        "version": STAGE.version,
        "run_key": run.key,
        "steps": run.steps,
        **flatten(run.identity, "run"),
        "segments": segments,
    }
    return Key(STAGE.name, digest_json(components), components, run.replacing)


def circumstances(config: Config) -> Segment:
    """What is recorded of how steps are made, beside what decides the run."""
    return {
        "code": STAGE.code_digest(),
        "libraries": library_versions(STAGE.libraries),
        "ranks": rank_count(config.launch),
        "device": device_kind(config.launch),
        "layout": {
            "roles": {role: _layout(config.fsdp_of(role)) for role in config.roles()},
            "mapping": config.model_mapping.model_dump(exclude_none=True),
            "micro_batch": [config.trainer.per_device_train_batch_size, config.trainer.max_tokens_per_micro_batch],
        },
    }


def _layout(fsdp: FsdpConfig) -> list[Any]:
    return [fsdp.strategy, fsdp.hsdp_group_size, fsdp.ulysses_sequence_parallel_size]


def train(key: Key, config: Config, dataset: Reference, base: Reference, fresh: bool = False) -> Reference:
    """The trained policy. Goes on from the last committed checkpoint of its run.

    Args:
        key: as `key()` gave it; another process may have got further since, so what holds is found out again here.
        dataset: of `tokenize_dataset`.
        base: of `convert_checkpoint`.
        fresh: train from step 0 although there are checkpoints or a finished policy. Once begun, the plain command goes on
            with it until its policy has replaced the finished one.

    Returns:
        The Hugging Face form of the policy (opens with `from_pretrained`) and `metrics.jsonl`, `train.log`, `config.yaml`.
        Its results: `step`, `run_key`, `segments`.

    Raises:
        ConfigError: the run has more steps than are asked for.
    """
    run = Run.of(config, dataset, base)
    writable(run.directory.parent)
    with locked(run.lock_path, on_wait=lambda holder: logger.info("Waiting for %s, which runs the same training", holder)):
        fresh = fresh and not _started_afresh(run)
        while not fresh and (finished := run.finished(STAGE.name)) is not None:
            artifact = find(Key(STAGE.name, finished["key"], finished["components"]))  # a broken one is set aside
            if artifact is not None:
                return reference_of(artifact, "reused")
        with locked(
            run.directory / "ranks.lock", on_wait=lambda _: logger.info("Waiting until the ranks of a killed run are gone")
        ):
            pass
        if fresh:
            run.move_aside()
        run.check_length()
        resumed_from = run.committed_step() or None
        segments = run.segments(circumstances(config))

        def make(scratch: Path) -> dict[str, Any]:
            policy = run.policy()
            if policy is None:
                policy = _launch(run, segments, config, dataset, base)
            _copy(policy, run, scratch)
            return {"step": run.steps, "run_key": run.key, "segments": segments}

        key = _key_of(run, segments)
        reference = produce(key, make, key.replacing, notes=COPIED)
        run.remove_replaced()
        if resumed_from is None or reference.state == "reused":
            return reference
        return Reference(reference.stage, reference.key, reference.digest, "resumed", resumed_from)


def _launch(run: Run, segments: list[Segment], config: Config, dataset: Reference, base: Reference) -> Artifact:
    """Train to the last step and export."""
    writable(run.directory)
    run.write_segments(segments)
    _mark_start(run)
    config_path = run.directory / "config.yaml"
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    config_path.write_text(text, encoding="utf-8")
    done = run.committed_step()
    tracking = _tracking(config, run.key, done, fresh=run.replacing and not done)
    listeners: list[Listener] = [Progress(run.steps)]
    if "mlflow" in config.trainer.logger:
        listeners.append(tracking)
    with following(run.directory / "metrics.jsonl", listeners):
        run_ranks(
            PROGRAM,
            [
                f"--config_path={config_path}", f"--output_dir={run.directory}",
                f"--dataset={dataset.path}", f"--base={base.path}",
            ],
            launch=config.launch,
            log_path=run.directory / "train.log",
            grace_seconds=config.launch.grace_seconds,
            max_restarts=config.launch.max_restarts,
        )  # fmt: skip
    policy = run.policy()
    if policy is None:
        raise RanksCrashed(f"{PROGRAM} ended without a policy of step {run.steps}; see {run.directory / 'train.log'}.")
    return policy


def _copy(policy: Artifact, run: Run, scratch: Path) -> None:
    """The policy's verified files (hard links where the file system has them) and what tells how it came about."""
    for name in policy.manifest["files"]:
        target = scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(policy.path / name, target)
        except OSError:
            shutil.copyfile(policy.path / name, target)
    for name in COPIED:
        shutil.copyfile(run.directory / name, scratch / name)


def catch_up(config: Config, policy: Artifact) -> None:
    """Send to MLflow what it has not got of a finished training, because it was down then. To be called before registering.

    Raises:
        MlflowException: MLflow does not answer.
    """
    run_key = policy.results["run_key"]
    if "mlflow" not in config.trainer.logger:
        return
    if steps_logged(run_key) < policy.results["step"]:
        with following(policy.path / "metrics.jsonl", [_tracking(config, run_key, policy.results["step"])]):
            logger.info("Sending to MLflow the metrics that it missed")


def _tracking(config: Config, run_key: str, done: int, fresh: bool = False) -> Tracking:
    """The whole configuration is an artifact of the MLflow run; its params are the few settings by which people compare."""
    params = {
        "model": Path(config.model.name_or_path).name or config.model.name_or_path,
        "train_batch_size": config.settled(rank_count(config.launch)).trainer.train_batch_size,
        "rollout_n": config.rollout.n,
        "learning_rate": config.actor.learning_rate,
        "critic_learning_rate": config.critic.learning_rate,
        "kl_coef": config.algorithm.kl_coef,
        "seed": config.trainer.seed,
    }
    whole = config.model_dump(mode="json")
    return Tracking(config.registry.experiment, run_key, config.registry.name, params, whole, done, fresh)


def _flow_run() -> str | None:
    from prefect.runtime import flow_run

    return flow_run.id


def _mark_start(run: Run) -> None:
    """Note which flow run began this directory."""
    path = run.directory / "started.json"
    if not path.exists():
        path.write_text(json.dumps({"flow_run": _flow_run()}), encoding="utf-8")


def _started_afresh(run: Run) -> bool:
    """Whether this very flow run began the directory already: a retry of `--fresh` goes on, it does not start over again."""
    path = run.directory / "started.json"
    return path.exists() and _flow_run() is not None and json.loads(path.read_text(encoding="utf-8"))["flow_run"] == _flow_run()


train_policy = stage_task(train, STAGE)
