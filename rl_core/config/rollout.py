"""`rollout`: how responses are generated during training."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from rl_core.config.base import Runtime, Section


class RolloutConfig(Section):
    """Sampling of responses from the current policy."""

    n: PositiveInt = 1
    """Responses sampled for each prompt."""

    max_new_tokens: PositiveInt = 256
    """Longest response in tokens; one that reaches it without an end token counts as truncated."""

    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in the rollout and in the log-probabilities of training alike."""

    batch_size: Annotated[Runtime[int], Field(gt=0)] = 64
    """Responses that a rank generates at a time; where one has ended the next begins."""
