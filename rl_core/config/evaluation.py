"""`evaluation` and `registry`: how a policy is judged, and when it becomes the champion."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from rl_core.config.base import Runtime, Section


class EvaluationConfig(Section):
    """Base, champion and trained policy answer the same held-out prompts with the same random draws."""

    prompts: PositiveInt = 128
    """Held-out prompts, at most; the first in the order of their content hashes, equal ones once."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""

    max_new_tokens: PositiveInt | None = None
    """null: as in `rollout`."""

    seed: int = 0
    """Seed of the draws where the temperature is not 0."""

    success_reward: float = 1.0
    """A response counts as right in `accuracy` from this reward on."""

    every_steps: Annotated[Runtime[int | None], Field(gt=0)] = None
    """Evaluate the policy in training on the same prompts after every so many steps (`val/…` among the metrics). null: only
    the finished policy."""

    samples: NonNegativeInt = 20
    """Prompts and responses shown in the report."""


class GateConfig(Section):
    """What the trained policy must show to become the champion."""

    metric: Runtime[Literal["reward", "accuracy"]] = "reward"
    """Mean reward or share of right answers, on the held-out prompts."""

    min_improvement: Runtime[float] = 0.0
    """By how much it must be above the champion's (the base model's where there is no champion yet); an equal one does
    not replace it."""


class RegistryConfig(Section):
    """The registered model in MLflow."""

    name: Annotated[Runtime[str], Field(pattern=r"^[A-Za-z0-9_-]+$")] = "policy"
    """Name of the registered model; MLflow allows no dot in it."""

    experiment: Runtime[str] = "ppoflow"
    """MLflow experiment of the runs."""

    gate: Runtime[GateConfig] = GateConfig()
    """When a version gets the alias `champion`."""
