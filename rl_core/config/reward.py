"""`reward`: what a response is worth."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator

from rl_core.config.base import Runtime, Section
from rl_core.config.model import PretrainedModel
from rl_core.config.roles import RoleConfig


class FallibleReward(Section):
    """What can fail on a response."""

    timeout_s: Annotated[Runtime[float | None], Field(gt=0)] = 30.0
    """Seconds for one response; of a function that takes lists, for one call; of an endpoint, for one request. Other kinds are
    judged in a process of their own, one for each rank, which is ended at that time and started anew; null: in the rank's own
    process, with no limit."""

    on_error: Literal["raise", "value"] = "raise"
    """Where a response cannot be judged (an exception, the timeout, no finite number): stop the run and say why, or count the
    response in `reward/failed` and let it be worth `error_value`."""

    error_value: float = 0.0
    """What such a response is worth."""

    @model_validator(mode="after")
    def _worth(self) -> "FallibleReward":
        if self.on_error == "raise" and self.error_value != 0:
            raise ValueError("reward.error_value has no effect with reward.on_error = raise; set reward.on_error to value")
        return self


class ReasoningGymReward(FallibleReward):
    """reasoning-gym's own verifier of the dataset that the prompt came from."""

    kind: Literal["reasoning_gym"]
    extract: Literal["text", "last_number", "answer_tag"] = "last_number"
    """What of the response the verifier sees: all of it, the last number in it, or what stands between `<answer>` and
    `</answer>`. Models wrap the number in a sentence, which the verifier itself would count as wrong."""


class FunctionReward(FallibleReward):
    """A Python function, taken as verl and TRL take theirs; the names of its parameters say which.

    `(data_source, solution_str, ground_truth, extra_info) -> float` judges one response, as in verl; it gets those that it
    names, and the response's tokens as `response_ids`. `(prompts, completions, **columns) -> list[float | None]` judges a list of
    responses, as in TRL; None says that it does not apply to one. Both may be `async`, return dicts whose other numbers become
    metrics, and a list of numbers, one for each token, in place of a number.
    """

    kind: Literal["function"]
    path: Runtime[str | None] = None
    """The Python file. It may import what lies beside it. The content of all of it, not its path, enters the keys."""
    module: Annotated[Runtime[str | None], Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] = None
    """In place of a file: a module that is installed or lies in the working directory, `package.rewards`. Its content enters the
    keys."""
    name: str = "compute_score"
    """The function in it."""
    completions: Literal["text", "messages"] = "text"
    """What a function that takes lists gets as `prompts` and `completions`: texts, or lists of messages (`[{role, content}]`), as
    TRL gives to functions of conversational data. The prompt is the last user message."""

    @model_validator(mode="after")
    def _one_place(self) -> "FunctionReward":
        if (self.path is None) == (self.module is None):
            raise ValueError("reward.path and reward.module: give one of them, the file or the module that holds the function")
        return self


class MathReward(FallibleReward):
    """1 where the response's mathematical answer equals `ground_truth`, else 0, by math-verify (the extra `math`).

    The answer may stand anywhere in the response, best in `\\boxed{}` or between dollar signs; numbers, expressions, sets,
    intervals, equations and matrices are compared as what they mean.
    """

    kind: Literal["math"]


class RegexReward(FallibleReward):
    """1 where what a regular expression finds in the response equals `ground_truth`, else 0."""

    kind: Literal["regex"]
    pattern: str
    """In Python's syntax; the last match counts. For GSM8K's answers: `#### (-?[0-9.,]+)`."""
    group: NonNegativeInt | str = 0
    """The group of the pattern that is compared: its number or name; 0 is all of the match."""
    normalise: bool = True
    """Compare numbers as numbers (`1,800.0` is `1800`, `$` before them and `%` behind them are nothing) and texts without case
    and with each white space as one blank; false: letter by letter."""

    @model_validator(mode="after")
    def _compiles(self) -> "RegexReward":
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"reward.pattern = {self.pattern!r} is no regular expression: {error}") from None
        if self.group not in (0, *range(1, compiled.groups + 1), *compiled.groupindex):
            groups = ", ".join(map(str, [*range(compiled.groups + 1), *compiled.groupindex]))
            raise ValueError(f"reward.group = {self.group!r}: the pattern has no such group (it has {groups})")
        return self


class HttpReward(FallibleReward):
    """A service that judges responses: each request is a POST of JSON,

        {"samples": [{"prompt_id", "question", "ground_truth", "data_source", "extra_info", "response", "response_ids"}, …]}

    and each reply `{"scores": […]}` with one entry for each sample, in their order: a number, a list of numbers (one for each
    token of `response_ids`), an object with either under `score` or `tokens` whose other numbers become metrics, or null where
    the reward does not apply. Redirects are not followed.
    """

    kind: Literal["http"]
    url: Annotated[str, Field(pattern=r"^https?://[^/?#]")]
    """It enters the keys: no password in it. A service that judges otherwise from now on wants another URL, or `--fresh`."""
    headers: Runtime[dict[str, str]] = Field(default_factory=dict)
    """Header fields, `{Authorization: "Bearer $TOKEN"}`: `$NAME` is an environment variable, read when a request is made, so that
    no secret is stored with the configuration."""
    batch_size: Runtime[PositiveInt] = 64
    """Responses in one request."""
    retries: Runtime[NonNegativeInt] = 3
    """Further tries after a timeout, a lost connection and the statuses 429 and 5xx, each after a longer pause."""

    @model_validator(mode="after")
    def _no_secrets(self) -> "HttpReward":
        if "@" in re.split("[/?#]", self.url)[2]:
            raise ValueError("reward.url holds a name or a password, which would be stored with the keys; use reward.headers")
        for name, value in self.headers.items():
            if not re.search(r"\$\{?[A-Za-z_]", value):
                raise ValueError(
                    f"reward.headers.{name}: its value would be stored with the configuration. Put it into an environment "
                    f"variable and write the variable's name here: {name}: $NAME (without braces)"
                )
        if self.timeout_s is None:
            raise ValueError("reward.timeout_s = null: a request needs a limit; give its seconds")
        return self


class ModelReward(PretrainedModel, RoleConfig):
    """A reward model: what it says of prompt and response at their last token is the reward.

    A sequence classifier with one output (`num_labels: 1`, head `score`), or a causal language model, which gets a head of random
    values (only good for trials; that is said). It has its own tokenizer: where that shares the policy's vocabulary the ids are
    used as they are, else the text is encoded anew.
    """

    kind: Literal["model"]


SingleReward = Annotated[
    ReasoningGymReward | FunctionReward | MathReward | RegexReward | HttpReward | ModelReward, Field(discriminator="kind")
]


class WeightedPart(Section):
    """A part of a weighted reward."""

    weight: float
    """What its scores are multiplied by."""
    reward: SingleReward
    """Of any other kind."""


class WeightedReward(Section):
    """The weighted sum of several rewards, at most one of them a model. A part that does not apply to a response counts nothing.
    The score of each part becomes a metric, `reward/<name of the function, or kind>`."""

    kind: Literal["weighted"]
    parts: Annotated[list[WeightedPart], Field(min_length=1)]
    """`[{weight: 1.0, reward: {kind: math}}, {weight: 0.2, reward: {kind: function, path: format.py}}]`"""

    @field_validator("parts", mode="wrap")
    @classmethod
    def _named_parts(cls, value: Any, handler: Any) -> Any:
        """Say what is wrong under the names that the user wrote: pydantic's places hold kinds, which are no keys."""
        try:
            return handler(value)
        except ValidationError as error:
            kinds = {"reasoning_gym", "function", "math", "regex", "http", "model"}
            said = []
            for item in error.errors():
                place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"] if part not in kinds)
                said.append(f"reward.parts{place}: {item['msg'].removeprefix('Value error, ')}")
            raise ValueError("; ".join(said)) from None

    @model_validator(mode="after")
    def _one_model(self) -> "WeightedReward":
        models = [number for number, part in enumerate(self.parts) if isinstance(part.reward, ModelReward)]
        if len(models) > 1:
            raise ValueError(f"reward.parts{models}: a run has one reward model at most")
        return self

    def identity(self) -> dict[str, Any]:
        """The kind, and weight and identity of each part."""
        parts = [{"weight": part.weight, "reward": part.reward.identity()} for part in self.parts]
        return {"kind": self.kind, "parts": parts}


RewardConfig = Annotated[
    ReasoningGymReward | FunctionReward | MathReward | RegexReward | HttpReward | ModelReward | WeightedReward,
    Field(discriminator="kind"),
]


def model_of(reward: Any) -> ModelReward | None:
    """The reward model that a `reward` section names, alone or as a part; None: none."""
    if isinstance(reward, WeightedReward):
        return next((part.reward for part in reward.parts if isinstance(part.reward, ModelReward)), None)
    return reward if isinstance(reward, ModelReward) else None


def with_model(reward: Any, model: ModelReward) -> Any:
    """A `reward` section with its model replaced."""
    if not isinstance(reward, WeightedReward):
        return model
    parts = [part.model_copy(update={"reward": model}) if isinstance(part.reward, ModelReward) else part for part in reward.parts]
    return reward.model_copy(update={"parts": parts})


def weight_of_model(reward: Any) -> float:
    """What the scores of the reward model are multiplied by."""
    if isinstance(reward, WeightedReward):
        return next((part.weight for part in reward.parts if isinstance(part.reward, ModelReward)), 0.0)
    return 1.0
