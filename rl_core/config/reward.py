"""`reward`: what a response is worth."""

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config.base import Runtime, Section
from rl_core.config.model import PretrainedModel
from rl_core.config.roles import RoleConfig


class ReasoningGymReward(Section):
    """reasoning-gym's own verifier of the dataset that the prompt came from."""

    kind: Literal["reasoning_gym"]
    extract: Literal["text", "last_number", "answer_tag"] = "last_number"
    """What of the response the verifier sees: all of it, the last number in it, or what stands between `<answer>` and
    `</answer>`. Models wrap the number in a sentence, which the verifier itself would count as wrong."""


class FunctionReward(Section):
    """A Python function `(data_source, solution_str, ground_truth, extra_info) -> float` (verl's signature)."""

    kind: Literal["function"]
    path: Runtime[str]
    """The Python file. It may import what lies beside it. The content of all of it, not its path, enters the keys."""
    name: str = "compute_score"
    """The function in it."""


class ModelReward(PretrainedModel, RoleConfig):
    """A reward model: what it says of prompt and response at their last token is the reward.

    A sequence classifier with one output (`num_labels: 1`, head `score`), or a causal language model, which gets a head of random
    values (only good for trials; that is said). It has its own tokenizer: where that shares the policy's vocabulary the ids are
    used as they are, else the text is encoded anew.
    """

    kind: Literal["model"]


RewardConfig = Annotated[ReasoningGymReward | FunctionReward | ModelReward, Field(discriminator="kind")]
