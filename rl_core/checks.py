"""What can be refused before models load: a run directory of another run, too few prompts, positions or rows
of the embedding."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.artifacts import Artifact
from rl_core.config import Config
from rl_core.data.prompts import Prompts
from rl_core.digests import flatten
from rl_core.errors import ConfigError, ModelError
from rl_core.models.auto import model_config


def check_can_go_on(latest: Artifact | None, key: str, identity: dict[str, Any], total: int, output: Path) -> None:
    """Raises ConfigError where the run directory's last checkpoint is of another run, or beyond the length that is asked for."""
    if latest is None:
        return
    if latest.key != key:
        kept = json.loads((latest.path / "state.json").read_text(encoding="utf-8")).get("identity", {})
        there, here = flatten(kept), flatten(identity)
        differing = [
            f"{name} ({there.get(name)!r} there, {here.get(name)!r} here)"
            for name in sorted(there.keys() | here.keys())
            if there.get(name) != here.get(name)
        ]
        raise ConfigError(
            f"--output_dir {output} holds another run: it differs in {'; '.join(differing[:6])}. Give each run a directory "
            "of its own. (A falling learning rate makes the length part of a run, and trainer.gradient_accumulation_steps the "
            "number of ranks: give trainer.train_batch_size instead to go on with another number.)"
        )
    if latest.results["step"] > total:
        raise ConfigError(
            f"trainer.max_steps: the run in {output} has {latest.results['step']} steps already, more than the {total} wanted. "
            "Raise it, or start over (ppoflow run --fresh, or another --output_dir)."
        )


def check_positions(config: Config, dataset: Artifact, base: Artifact) -> None:
    """Refuse now what would end the run at the first rollout of the longest prompt."""
    longest, settings = dataset.results["prompt_length"]["max"], model_config(base.path, config.model.trust_remote_code)
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None)
    for name, most in {"rollout": config.rollout.max_new_tokens, "evaluation": config.eval_max_new_tokens}.items():
        if positions is not None and longest + most > positions:
            raise ConfigError(
                f"{name}.max_new_tokens: {most} behind the longest prompt ({longest} tokens) is more than the {positions} "
                "positions of the model. Lower it, or data.max_prompt_length."
            )


def check_token_ids(config: Config, prompts: Sequence[Prompts], base: Artifact) -> None:
    """Refuse prompts with ids that the embedding lacks: an index out of range in the middle of a step, on a GPU one that ends
    the process. Ids that no prompt has do no harm: the tokenizers of some models know tokens of their larger relatives."""
    rows = model_config(base.path, config.model.trust_remote_code).get_text_config().vocab_size
    greatest = max(some.greatest_id() for some in prompts)
    if greatest >= rows:
        raise ModelError(
            f"model.name_or_path: the prompts have token ids up to {greatest}, but the model's embedding has only {rows} rows. "
            "Give the tokenizer that belongs to the model, or resize its embedding (resize_token_embeddings)."
        )


def check_enough_prompts(prompts: int, per_step: int) -> None:
    """Raises ConfigError where a step takes more prompts than there are."""
    if prompts < per_step:
        raise ConfigError(
            f"trainer.train_batch_size: {per_step} prompts a step, but only {prompts} training prompts. Lower it to "
            f"{prompts} or less, or give more prompts."
        )
