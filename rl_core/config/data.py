"""`data`: where prompts come from and how they become token ids."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from rl_core.config.base import Runtime, Section


class ReasoningGymSource(Section):
    """Prompts from one of reasoning-gym's generators; its verifier can be the reward."""

    kind: Literal["reasoning_gym"]
    dataset: str
    """Name of the generator: `chain_sum`, `basic_arithmetic`, `gsm_symbolic`, …"""
    size: PositiveInt
    """Number of problems, held-out ones included."""
    seed: int = 0
    """Seed of the generator."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The generator's own settings, e.g. `{min_terms: 2, max_terms: 2}`."""


class FilesSource(Section):
    """Rows of JSON, JSON Lines, CSV, Parquet or Arrow files."""

    kind: Literal["files"]
    path: Runtime[str]
    """File, glob or fsspec URL (`data/*.jsonl`, `s3://bucket/prompts.parquet`). Content, not path, enters the key."""
    format: Literal["json", "csv", "parquet", "arrow"] | None = None
    """Taken from the file's ending where not given; `json` reads JSON Lines too."""


class HubSource(Section):
    """A dataset of the Hugging Face hub."""

    kind: Literal["hub"]
    name: str
    """`openai/gsm8k`"""
    subset: str | None = None
    """The dataset's configuration: `main`."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Branch, tag or commit. Without it the newest is taken, and its commit is recorded."""


Source = Annotated[ReasoningGymSource | FilesSource | HubSource, Field(discriminator="kind")]


class DataConfig(Section):
    """Prompts, their columns, their length, and which of them are held out."""

    source: Source = ReasoningGymSource(
        kind="reasoning_gym",
        dataset="chain_sum",
        size=2000,
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )
    """Where the rows come from."""

    prompt_column: str = "prompt"
    """Column with the prompt: a text (made one user message) or a list of `{role, content}` messages.
    The reasoning-gym source fills `prompt` and `answer`."""

    answer_column: str | None = "answer"
    """Column that reward functions get as `ground_truth`; null where there is none."""

    data_source_column: str | None = None
    """Column that reward functions get as `data_source`; without it that is the name of the source."""

    system_prompt: str | None = None
    """A system message put before prompts that have none."""

    suffix: str = ""
    """Text put behind the last user message, e.g. "Answer with the number only."."""

    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens, chat template included."""

    truncation: Literal["error", "left", "right", "drop"] = "error"
    """What becomes of a longer prompt: stop, cut its beginning, cut its end, or leave the row out (counted)."""

    max_dropped_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of rows that may be left out for any reason before the stage stops, naming the first such row."""

    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of prompts held out for evaluation. A hash of the prompt's content decides, so a prompt never changes sides
    when rows are added, and equal prompts are on the same side."""

    shard_rows: Annotated[Runtime[int], Field(gt=0)] = 10_000
    """Rows per Arrow shard: what an interrupted tokenization loses at most."""
