"""What `ppoflow run` would do, stage by stage, and why: `ppoflow explain`.

It runs no stage and moves nothing, but it may download the model and the data, as far as their content must be known.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from flows.inputs import model_source
from rl_core.artifacts import open_artifact
from rl_core.config import Config
from rl_core.errors import BrokenArtifact, ConfigError
from tasks import convert_checkpoint, evaluate_policy, tokenize_dataset, train_policy
from tasks.mlflow_registry import champion
from tasks.runs import Run
from tasks.store import Key, Reference, differences, reference_of

NAMED, UNRELATED = 6, 12
"""Differing components that are named; with more than UNRELATED it is another project's."""


@dataclass(frozen=True)
class Outcome:
    """What becomes of a stage."""

    stage: str
    outcome: Literal["reused", "resumes", "runs", "refused"]
    reason: str


def explain(config: Config) -> Iterator[Outcome]:
    """The outcome of each stage, as far as it is known before the stages in front of it have run."""
    source = model_source(config)
    dataset = yield from _look(tokenize_dataset.key(config, source))
    base = yield from _look(convert_checkpoint.key(config, source))
    if dataset is None or base is None:
        yield from _waiting(train_policy.STAGE.name, evaluate_policy.STAGE.name)
        return
    policy = yield from _look(train_policy.key(config, dataset, base), Run.of(config, dataset, base))
    if policy is None:
        yield from _waiting(evaluate_policy.STAGE.name)
        return
    yield from _look(evaluate_policy.key(config, dataset, base, policy, champion(config.registry.name, policy.digest)))
    yield Outcome("register_policy", "runs", "always, since it reads the registry; what is registered is not registered twice")


def _look(key: Key, run: Run | None = None) -> Generator[Outcome, None, Reference | None]:
    """Yields the outcome; returns the reference to what exists."""
    reason = ""
    if key.path.exists() and not key.replacing:
        try:
            reference = reference_of(open_artifact(key.path), "reused")
        except BrokenArtifact as error:
            reason = f"what exists is broken: {error}"
        else:
            yield Outcome(key.stage, "reused", str(key.path))
            return reference
    if run is None:
        yield Outcome(key.stage, "runs", reason or _novelty(key))
    else:
        yield _training(key, run, reason)
    return None


def _training(key: Key, run: Run, reason: str) -> Outcome:
    """What becomes of a training whose policy is not there."""
    try:
        run.check_length()
    except ConfigError as error:
        return Outcome(key.stage, "refused", str(error))
    if step := run.committed_step():
        return Outcome(key.stage, "resumes", f"from step {step} of {run.steps} in {run.directory}")
    return Outcome(key.stage, "runs", reason or ("--fresh was begun" if key.replacing else _novelty(key)))


def _novelty(key: Key) -> str:
    """How a key differs from the nearest earlier one."""
    names = differences(key)
    if not names:
        return "the first of its kind"
    if len(names) > UNRELATED:
        return f"there is nothing like it yet (the nearest earlier one differs in {len(names)} components)"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"differs from the nearest earlier one in {', '.join(names[:NAMED])}{more}"


def _waiting(*stages: str) -> Iterator[Outcome]:
    """Stages whose inputs are not made yet; an equal input made anew would still find what exists."""
    for stage in (*stages, "register_policy"):
        yield Outcome(stage, "runs", "after the stages above, unless their output turns out as before")
