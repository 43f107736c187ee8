"""The checkpoints of a run: `step_000010/{tensors/, state.json, manifest.json}`, committed, verified, rotated.

    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    artifact = checkpoints.latest()
    if artifact is not None:
        state = checkpoints.load(artifact, tensors)
    checkpoints.save(step, tensors, state, key)

All three are collective where torch.distributed is initialised: rank 0 decides, and an error of one rank is raised on all.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl_core.artifacts import Artifact, commit, fresh_scratch, open_artifact, scratch_of, set_aside
from rl_core.checkpoint.dcp import load_tensors, save_tensors
from rl_core.digests import digest_file
from rl_core.errors import BrokenArtifact
from rl_core.together import together

log = logging.getLogger(__name__)

LEAST = 2
"""Never fewer are kept: the newest could be damaged."""


class Checkpoints:
    """The committed checkpoints in one directory.

    Args:
        directory: of the run; made by the first save.
        keep: newest ones kept; two at least.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = max(keep, LEAST)

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is."""
        return self.directory / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a directory, in ascending order; whether it is whole `latest` finds out."""
        if not self.directory.is_dir():
            return []
        names = (path.name.removeprefix("step_") for path in self.directory.glob("step_*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], key: str) -> Artifact:
        """Write, commit, then delete what is too old.

        Args:
            step: steps done; must not have a checkpoint yet.
            tensors: the same names on all ranks.
            state: JSON values of rank 0.
            key: of the run.

        Raises:
            StoreError: a rank could not write; whatever was committed before is untouched.
        """
        final = self.path(step)
        scratch = scratch_of(final)
        self._first_rank(lambda: self._begin(final))
        save_tensors(tensors, scratch / "tensors")
        rank = dist.get_rank() if dist.is_initialized() else 0
        # Each rank hashes its own files; the commit on rank 0 finds their digests remembered.
        together(lambda: [digest_file(path) for path in (scratch / "tensors").glob(f"__{rank}_*")])
        artifact = self._first_rank(lambda: self._end(scratch, final, step, state, key))
        assert artifact is not None
        return artifact

    def latest(self) -> Artifact | None:
        """The newest checkpoint that is what its manifest says; broken ones are set aside with a warning."""
        return self._first_rank(self._newest)

    def load(self, artifact: Artifact, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Read a checkpoint into `tensors`, in place, and return its state. Any number of ranks.

        Raises:
            ModelError: its tensors are not those asked for.
            BrokenArtifact: it cannot be read.
        """
        load_tensors(tensors, artifact.path / "tensors")
        return json.loads((artifact.path / "state.json").read_text(encoding="utf-8"))

    def _begin(self, final: Path) -> None:
        for leaving in self.directory.glob(".step_*.partial"):
            shutil.rmtree(leaving)
        fresh_scratch(final)

    def _end(self, scratch: Path, final: Path, step: int, state: dict[str, Any], key: str) -> Artifact:
        (scratch / "state.json").write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
        artifact = commit(scratch, final, kind="checkpoint", key=key, results={"step": step})
        older = [found for found in self.steps() if found < step]
        for old in older[: -(self.keep - 1)]:
            # Renamed first: a checkpoint that is half deleted must not look like a broken one.
            doomed = scratch_of(self.path(old))
            self.path(old).rename(doomed)
            shutil.rmtree(doomed)
        self._remove_broken()
        return artifact

    def _remove_broken(self) -> None:
        """Of those set aside the latest is kept, to look into, until it is older than the newest two: each is gigabytes."""
        broken = sorted(self.directory.glob(".step_*.broken-*"), key=_step_and_number)
        oldest = self.steps()[-LEAST:][0]
        for path in broken:
            if path is not broken[-1] or _step_and_number(path)[0] < oldest:
                shutil.rmtree(path)

    def _newest(self) -> Artifact | None:
        for step in reversed(self.steps()):
            try:
                return open_artifact(self.path(step))
            except BrokenArtifact as error:
                aside = set_aside(self.path(step))
                log.warning("%s It was set aside as %s and an earlier checkpoint is used.", error, aside.name)
        return None

    def _first_rank(self, action: Callable[[], Artifact | None]) -> Artifact | None:
        """Do it on rank 0; its result on all ranks."""
        if not dist.is_initialized():
            return action()
        result = [together(lambda: action() if dist.get_rank() == 0 else None)]
        dist.broadcast_object_list(result, src=0)
        return result[0]


def _step_and_number(aside: Path) -> tuple[int, int]:
    """Of a directory's name that `set_aside` made: `.step_000010.broken-0`."""
    _, step, number = aside.name.split(".")
    return int(step.removeprefix("step_")), int(number.removeprefix("broken-"))
