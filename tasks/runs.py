"""Run directories: a training in the making, with its checkpoints, found again by what decides it (`Run`).

`PPOFLOW_HOME/runs/<run key>/`; beside it `.<run key>.lock` for the one flow that trains. The ranks hold `ranks.lock` in it
shared, so that who takes it exclusively knows that the last rank of a dead predecessor is gone.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.artifacts import Artifact, open_artifact
from rl_core.config import Config
from rl_core.digests import digest_json
from rl_core.errors import BrokenArtifact, ConfigError
from rl_core.home import home
from rl_core.identity import training_identity
from tasks.devices import rank_count
from tasks.store import Reference, manifests

SEGMENTS = "segments.json"
begun_afresh: set[str] = set()
"""Keys of the runs that this process has begun again from step 0: going on with them needs no `--fresh`."""
Segment = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A training: `key` is the sha256 of `identity`; `steps` is how many it is to have in the end."""

    key: str
    identity: dict[str, Any]
    steps: int

    @classmethod
    def of(cls, config: Config, dataset: Reference, base: Reference) -> "Run":
        """The training that a configuration asks for, on these inputs."""
        config = config.settled(rank_count(config.launch))
        identity = training_identity(config, dataset.digest, base.digest)
        return cls(digest_json(identity), identity, config.total_steps(dataset.open().results["train_rows"]))

    @property
    def directory(self) -> Path:
        """Where it trains."""
        return home() / "runs" / self.key

    @property
    def lock_path(self) -> Path:
        """Held by the one flow that trains; outside the directory, which may be moved."""
        return self.directory.with_name(f".{self.key}.lock")

    def finished(self, stage: str) -> dict[str, Any] | None:
        """The manifest of the stored policy of this run and length, whatever code made it; None if there is none, or if a
        training from step 0 is about to replace it."""
        if self.replacing:
            return None
        for manifest in manifests(stage):
            components = manifest["components"]
            if components.get("run_key") == self.key and components.get("steps") == self.steps:
                return manifest
        return None

    def committed_step(self) -> int:
        """Steps done in the newest whole checkpoint; 0 if there is none."""
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in (self.directory / "checkpoints").glob("step_*"))
        for name in sorted((match[0] for match in names if match), key=lambda name: int(name[5:]), reverse=True):
            try:
                open_artifact(self.directory / "checkpoints" / name)
            except BrokenArtifact:
                continue
            return int(name[5:])
        return 0

    def policy(self) -> Artifact | None:
        """The exported policy of the last step, if the run has got that far."""
        try:
            artifact = open_artifact(self.directory / "policy")
        except BrokenArtifact:
            return None
        return artifact if artifact.results["step"] == self.steps else None

    def segments(self, now: Segment) -> list[Segment]:
        """What made which steps, when the rest is made under the circumstances `now`.

        A run that was killed and went on under the same circumstances has the one segment of an uninterrupted run.
        """
        try:
            earlier: list[Segment] = json.loads((self.directory / SEGMENTS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            earlier = []
        return extended(earlier, self.committed_step(), self.steps, now)

    def write_segments(self, segments: list[Segment]) -> None:
        """Note them, before the steps are made."""
        partial = self.directory / f".{SEGMENTS}.partial"
        partial.write_text(json.dumps(segments, indent=1), encoding="utf-8")
        os.replace(partial, self.directory / SEGMENTS)

    def check_length(self) -> None:
        """Raises ConfigError if the run is longer than what is asked for: steps cannot be taken back."""
        done = self.committed_step()
        if done > self.steps and self.policy() is None:
            raise ConfigError(
                f"trainer.max_steps: {self.steps} steps are asked for, but the run has {done} steps already ({self.directory}). "
                "Raise trainer.max_steps or start over with --fresh."
            )

    @property
    def replacing(self) -> bool:
        """Whether a training from step 0 (`--fresh`) was begun and its policy is not stored yet: the earlier run lies aside."""
        return any(self._replaced())

    def move_aside(self) -> None:
        """Make room for a run from step 0. What is moved is also the mark of one, until `remove_replaced` deletes it."""
        number = 0
        while (aside := self.directory.with_name(f".{self.key}.replaced-{number}")).exists():
            number += 1
        os.rename(self.directory, aside)
        begun_afresh.add(self.key)

    def remove_replaced(self) -> None:
        """Delete what `move_aside` left."""
        for aside in self._replaced():
            shutil.rmtree(aside)

    def _replaced(self) -> Iterator[Path]:
        return self.directory.parent.glob(f".{self.key}.replaced-*")


def extended(earlier: list[Segment], done: int, steps: int, now: Segment) -> list[Segment]:
    """The segments of a run that goes on from step `done` to `steps` under the circumstances `now`.

    Args:
        earlier: `{"from_step", "to_step", …circumstances}` in order, as planned then; what was not committed does not count.
    """
    kept = [{**segment, "to_step": min(segment["to_step"], done)} for segment in earlier if segment["from_step"] < done]
    if done >= steps and kept:
        return kept
    if kept and {**kept[-1], **now} == kept[-1]:
        return [*kept[:-1], {**kept[-1], "to_step": steps}]
    return [*kept, {"from_step": done, "to_step": steps, **now}]
