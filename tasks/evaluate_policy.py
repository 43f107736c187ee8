"""Stage 4: base model, champion and trained policy answer the same held-out prompts; the comparison and its plots.

Each model's answers are an artifact of their own (`evaluate_model`), found again by the model's digest: the base model and a
champion are evaluated once, however many policies are compared with them.
"""

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from rl_core.config import Config
from rl_core.config.reward import model_of
from rl_core.errors import ConfigError
from tasks import report
from tasks.caching import stage_task
from tasks.mlflow_registry import Champion
from tasks.publish import show_in_mlflow, show_in_prefect
from tasks.store import Key, Reference, Stage, produce
from tasks.torchrun import run_ranks

logger = logging.getLogger(__name__)

MODEL_STAGE = Stage(
    "evaluate_model",
    version=1,
    sources=(
        "rl_core/evaluate.py", "rl_core/validation.py", "rl_core/role.py", "rl_core/groups.py",
        "rl_core/phases.py", "rl_core/batching.py", "rl_core/distributed.py", "rl_core/data",
        "rl_core/models", "rl_core/checkpoint", "rl_core/rollout", "rl_core/rewards", "rl_core/algorithms",
    ),
    libraries=("torch", "transformers"),
)  # fmt: skip
STAGE = Stage("evaluate_policy", version=1, sources=("tasks/evaluate_policy.py", "tasks/report.py"), libraries=("matplotlib",))


def key(config: Config, dataset: Reference, base: Reference, policy: Reference, champion: Champion | None) -> Key:
    """The key of the comparison: the evaluations that it compares, and the training whose curve it shows."""
    keys = model_keys(config, dataset, base, policy, champion)
    return STAGE.key(
        config={"evaluation": {"samples": config.evaluation.samples}},
        inputs={"training": policy.digest, "evaluations": {name: key.value for name, key in keys.items()}},
    )


def model_keys(
    config: Config, dataset: Reference, base: Reference, policy: Reference, champion: Champion | None
) -> dict[str, Key]:
    """The key of each model's evaluation, in the order in which they are shown."""
    from rl_core.rewards import reward_fingerprint

    models = {"base": base.digest, **({"champion": champion.digest} if champion else {}), "policy": policy.digest}
    settings = config.evaluation.identity() | {"max_new_tokens": config.eval_max_new_tokens}
    del settings["samples"]
    computed = {"torch_dtype": config.dtype_of("actor"), "fsdp": config.fsdp_of("actor").identity()}
    shared = {"evaluation": settings, "attention": config.model.attn_implementation, **computed}
    if model_of(config.reward) is not None:
        shared["reward"] = {"torch_dtype": config.dtype_of("reward"), "fsdp": config.fsdp_of("reward").identity()}
    inputs = {"dataset": dataset.digest, "reference": base.digest, "reward": reward_fingerprint(config.reward)}
    return {name: MODEL_STAGE.key(shared, inputs | {"model": digest}) for name, digest in models.items()}


def evaluate(
    key: Key,
    config: Config,
    dataset: Reference,
    base: Reference,
    policy: Reference,
    champion: Champion | None,
    fresh: bool = False,
) -> Reference:
    """Evaluate what is not evaluated yet, then compare.

    Args:
        champion: the registered policy to beat; None where there is none yet.
        fresh: evaluate and compare again although it was done.

    Returns:
        The comparison: `report.json` (`{"base", "champion", "policy"}` → result or null, and `digests`), `report.md`,
        `samples.md`, `learning_curve.png`, `rewards.png`, `samples/<model>.jsonl`.
    """

    def compare(scratch: Path) -> dict[str, Any]:
        evaluations = _evaluate_models(config, dataset, base, policy, champion, fresh)
        digests = {"base": base.digest, "champion": champion.digest if champion else None, "policy": policy.digest}
        return _compare(scratch, config, policy, evaluations, digests)

    reference = produce(key, compare, fresh)
    artifact = reference.open()
    show_in_prefect(artifact)
    show_in_mlflow(artifact, policy.open().results["run_key"])
    return reference


evaluate_policy = stage_task(evaluate, STAGE)


def _evaluate_models(
    config: Config, dataset: Reference, base: Reference, policy: Reference, champion: Champion | None, fresh: bool
) -> dict[str, Reference]:
    if champion is not None:
        _same_tokenizer(champion, base.path)
    directories = {"base": base.path, "policy": policy.path} | ({"champion": champion.path} if champion else {})
    done: dict[str, Reference] = {}
    evaluations = {}
    for name, key in model_keys(config, dataset, base, policy, champion).items():
        if key.value not in done:  # the champion may be the policy itself
            done[key.value] = _evaluate_model(name, key, config, dataset, base, directories[name], fresh)
        evaluations[name] = done[key.value]
    return evaluations


def _evaluate_model(
    name: str, key: Key, config: Config, dataset: Reference, base: Reference, model: Path, fresh: bool
) -> Reference:
    def answer(scratch: Path) -> dict[str, Any]:
        logger.info("Evaluating the %s", name)
        with tempfile.TemporaryDirectory() as directory:
            config_path = Path(directory) / "config.yaml"
            config_path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
            run_ranks(
                "rl_core.evaluate",
                [
                    f"--config_path={config_path}", f"--dataset={dataset.path}", f"--reference={base.path}",
                    f"--model={model}", f"--output_dir={scratch}",
                ],
                launch=config.launch,
                log_path=scratch / "evaluate.log",
            )  # fmt: skip
        return {}

    reference = produce(key, answer, fresh)
    if reference.state == "reused":
        logger.info("The %s was evaluated before: reused", name)
    return reference


def _compare(
    scratch: Path, config: Config, policy: Reference, evaluations: dict[str, Reference], digests: dict[str, str | None]
) -> dict[str, Any]:
    """Write the comparison's files; returns the means."""
    directories = {name: reference.open().path for name, reference in evaluations.items()}
    results = {name: json.loads((path / "result.json").read_text(encoding="utf-8")) for name, path in directories.items()}
    answers = {name: report.read_jsonl(path / "samples.jsonl") for name, path in directories.items()}
    whole = {"champion": None, **results, "digests": digests}
    (scratch / "report.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    (scratch / "report.md").write_text(report.comparison(results), encoding="utf-8")
    (scratch / "samples.md").write_text(report.samples(answers, config.evaluation.samples), encoding="utf-8")
    (scratch / "samples").mkdir()
    for name, path in directories.items():
        shutil.copyfile(path / "samples.jsonl", scratch / "samples" / f"{name}.jsonl")
    report.learning_curve(report.read_jsonl(policy.path / "metrics.jsonl"), scratch / "learning_curve.png")
    report.reward_histogram(results, scratch / "rewards.png")
    return {name: {metric: result[metric]["mean"] for metric in ("reward", "accuracy", "kl")} for name, result in results.items()}


def _same_tokenizer(champion: Champion, base: Path) -> None:
    """The prompts are token ids: a model with another vocabulary would answer something else."""
    ours, theirs = (_vocabulary(directory / "tokenizer.json") for directory in (base, champion.path))
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"registry.name: the champion of {champion.name} (version {champion.version}) has another vocabulary than "
            "model.name_or_path, so the two cannot be compared on the same prompts. Register policies of this base model under "
            "another registry.name."
        )


def _vocabulary(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"] if path.exists() else None
