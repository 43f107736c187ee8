"""Stage 5: the trained policy becomes a version of the registered model, and the champion if the gate holds.

Never cached, since it reads what others change, but idempotent: a version is found again by the policy's digest, and the
same comparison gives the same answer. A version that somebody rolled back comes back by `ppoflow promote` only.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rl_core.artifacts import Artifact
from rl_core.config import Config
from rl_core.config.evaluation import GateConfig
from tasks.mlflow_registry import (
    CANDIDATE,
    Version,
    aliases_of,
    champion_version,
    digest_of,
    registry,
    registry_lock,
)
from tasks.mlflow_versions import ROLLED_BACK, make_champion, register
from tasks.publish import show_in_mlflow
from tasks.store import Reference
from tasks.tracking import experiment_id, find_run
from tasks.train_policy import catch_up

logger = logging.getLogger(__name__)

DECISION = "ppoflow.decision"
"""Tag of a version: the gate's last answer, in a sentence."""


@dataclass(frozen=True)
class Registered:
    """A version of a registered model."""

    name: str
    version: str
    aliases: list[str]
    digest: str
    """Of the policy."""
    created: bool
    """It was registered just now, not found."""


@dataclass(frozen=True)
class Decision:
    """The gate's answer about a version."""

    promote: bool
    sentence: str
    """What the version is or does, with the numbers; its subject is the version."""
    settled: bool = False
    """It was decided earlier, and the tag says why."""


@task(name="register_policy", cache_policy=NO_CACHE)
def register_policy(config: Config, dataset: Reference, base: Reference, policy: Reference, evaluation: Reference) -> Registered:
    """Register the policy with its lineage, point `candidate` at it, and `champion` where the gate holds.

    Raises:
        RegistryError: MLflow does not answer.
        BrokenArtifact: the registered files are not those of the policy; it is not made the champion.
    """
    name, compared, trained = config.registry.name, evaluation.open(), policy.open()
    report = json.loads((compared.path / "report.json").read_text(encoding="utf-8"))
    run_key = trained.results["run_key"]
    with registry_lock(), registry(f"register the policy as {name}") as client:
        catch_up(config, trained)
        run_id = find_run(run_key)
        tags = lineage(dataset, base, policy, evaluation) | means(compared) | {"ppoflow.run_key": run_key}
        experiment = experiment_id(config.registry.experiment)
        version, created = register(client, name, trained, tags=tags, experiment_id=experiment, run_id=run_id)
        client.set_registered_model_alias(name, CANDIDATE, version.number)
        decision = decide(config.registry.gate, report, version, champion_version(client, name))
        logger.info("%s version %s %s.", name, version.number, decision.sentence)
        if decision.promote:
            make_champion(client, version)
        if not decision.settled:
            client.set_model_version_tag(name, version.number, DECISION, decision.sentence)
        registered = Registered(name, version.number, aliases_of(client, version), policy.digest, created)
    show_in_mlflow(compared, run_key)
    return registered


def decide(gate: GateConfig, report: dict[str, Any], version: Version, champion: Version | None) -> Decision:
    """Whether a version becomes the champion.

    Args:
        report: the comparison (`report.json`).
        champion: the champion now; None where there is none, then the base model is the one to beat.
    """
    if champion is not None and champion.number == version.number:
        return Decision(False, "is the champion and stays it", settled=True)
    if ROLLED_BACK in version.tags:
        again = f"`ppoflow promote {version.name} {version.number}` makes it the champion again"
        return Decision(False, f"was rolled back and does not become the champion by itself; {again}", settled=True)
    if champion is not None and digest_of(champion) != report["digests"]["champion"]:
        changed = f"version {champion.number} became the champion after this policy was compared with another"
        return Decision(False, f"does not become the champion: {changed}. Run the same command again to compare them")
    rival, rival_name = ("base", "the base model") if champion is None else ("champion", f"version {champion.number}")
    ours, theirs = report["policy"][gate.metric]["mean"], report[rival][gate.metric]["mean"]
    promote = ours - theirs > gate.min_improvement
    sentence = (
        f"{'becomes' if promote else 'does not become'} the champion: {gate.metric} {ours:.4f} against {theirs:.4f} of "
        f"{rival_name}, {ours - theirs:+.4f}, where more than {gate.min_improvement:+.4f} is asked for"
    )
    return Decision(promote, sentence)


def lineage(dataset: Reference, base: Reference, policy: Reference, evaluation: Reference) -> dict[str, str]:
    """Keys and digests of the artifacts that led to a version, as its tags."""
    tags = {}
    for reference in (dataset, base, policy, evaluation):
        tags[f"ppoflow.{reference.stage}.key"] = reference.key
        tags[f"ppoflow.{reference.stage}.digest"] = reference.digest
    return tags


def means(evaluation: Artifact) -> dict[str, str]:
    """The policy's means on the held-out prompts, as tags."""
    return {f"ppoflow.evaluation.{metric}": f"{mean:.6g}" for metric, mean in evaluation.results["policy"].items()}
