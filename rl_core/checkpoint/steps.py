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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl_core.artifacts import Artifact, commit, fresh_scratch, scratch_of
from rl_core.checkpoint.dcp import load_tensors, save_tensors
from rl_core.checkpoint.formats import FORMAT, refuse_other_format, upgraded
from rl_core.checkpoint.room import check_room, stored_bytes
from rl_core.checkpoint.rotation import LEAST, broken_in, in_use, rotate, step_path, steps_in, whole_or_aside
from rl_core.errors import StoreError
from rl_core.together import together

log = logging.getLogger(__name__)


class Checkpoints:
    """The committed checkpoints in one directory.

    Args:
        directory: of the run; made by the first save.
        keep: newest ones kept; two at least.
        best: a metric; of those saved with it the one with the highest value is kept too.
        process_group: of all ranks, for `save` alone, which may then run in a thread; None: the default one.
    """

    def __init__(
        self, directory: Path, keep: int, best: str | None = None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.directory = directory
        self.keep = max(keep, LEAST)
        self.best = best
        self.process_group = process_group

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is."""
        return step_path(self.directory, step)

    def steps(self) -> list[int]:
        """Steps that have a directory, in ascending order; whether it is whole `latest` finds out."""
        return steps_in(self.directory)

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        key: str,
        metrics: Mapping[str, float] | None = None,
    ) -> Artifact:
        """Write, commit, then delete what is too old.

        Args:
            step: steps done; must not have a checkpoint yet.
            tensors: the same names on all ranks, or each rank those of the models that it holds.
            state: JSON values of rank 0.
            key: of the run.
            metrics: of rank 0, among them perhaps the one that says which is best.

        Raises:
            StoreError: a rank could not write, or there is no room; whatever was committed before is untouched.
        """
        final = self.path(step)
        scratch = scratch_of(final)
        needed = stored_bytes(tensors, self.process_group)
        self._first_rank(lambda: self._begin(final, needed))
        save_tensors(tensors, scratch / "tensors", self.process_group)
        rated = {name: value for name, value in (metrics or {}).items() if name == self.best}
        results = {"step": step} | ({"metrics": rated} if rated else {})
        artifact = self._first_rank(lambda: self._end(scratch, final, state, key, results))
        assert artifact is not None
        return artifact

    def latest(self) -> Artifact | None:
        """The newest checkpoint that is what its manifest says; broken ones are set aside with a warning. For the one who writes
        them: what a dead writer left is removed.

        Raises:
            StoreError: there were checkpoints, and none is whole; or the newest has a format that this release does not read.
        """
        return self._first_rank(self._newest)

    def load(self, artifact: Artifact, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Read a checkpoint into `tensors`, in place, and return its state. Any number of ranks.

        Raises:
            ModelError: its tensors are not those asked for.
            BrokenArtifact: it cannot be read.
        """
        with in_use(artifact.path):
            load_tensors(tensors, artifact.path / "tensors")
            return upgraded(json.loads((artifact.path / "state.json").read_text(encoding="utf-8")), artifact.path)

    def _begin(self, final: Path, needed: int) -> None:
        self._collect()
        fresh_scratch(final)
        check_room(self.directory, needed, "A checkpoint")

    def _end(self, scratch: Path, final: Path, state: dict[str, Any], key: str, results: dict[str, Any]) -> Artifact:
        text = json.dumps({"format": FORMAT} | state, allow_nan=False)
        (scratch / "state.json").write_text(text, encoding="utf-8")
        artifact = commit(scratch, final, kind="checkpoint", key=key, results=results)
        self._rotate()
        return artifact

    def _rotate(self) -> None:
        try:
            rotate(self.directory, self.keep, self.best)
        except OSError as error:  # what matters is committed, and the next save asks for room
            log.warning("Older checkpoints in %s could not be deleted: %s.", self.directory, error)

    def _collect(self) -> None:
        """What a dead save or rotation left."""
        for leaving in self.directory.glob(".step_*.partial"):
            shutil.rmtree(leaving)

    def _newest(self) -> Artifact | None:
        self._collect()
        for step in reversed(self.steps()):
            refuse_other_format(self.path(step))
            artifact = whole_or_aside(self.path(step))
            if artifact is not None:
                if len(self.steps()) > self.keep + (self.best is not None):  # killed between a commit and its rotation
                    self._rotate()
                return artifact
        if broken := broken_in(self.directory):
            raise StoreError(
                f"{self.directory}: none of the run's checkpoints is whole; they were set aside as "
                f"{', '.join(path.name for path in broken)}. Bring back a copy of one (as step_…), or start over with "
                "ppoflow run --fresh (by hand: another --output_dir)."
            )
        return None

    def _first_rank(self, action: Callable[[], Artifact | None]) -> Artifact | None:
        """Do it on rank 0; its result on all ranks."""
        if not dist.is_initialized():
            return action()
        result = [together(lambda: action() if dist.get_rank() == 0 else None, self.process_group)]
        dist.broadcast_object_list(result, src=0, group=self.process_group)
        return result[0]
