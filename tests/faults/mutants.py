"""Faults that somebody could build into saving and resuming. The bench must see each of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.cases import Case


def no_rename() -> None:
    """A checkpoint is written where it will stay."""
    from rl_core import artifacts
    from rl_core.checkpoint import steps

    def commit(scratch: Path, final: Path, **more: Any) -> Any:
        aside = final.with_name(f"{final.name}.mutant")
        os.rename(scratch, aside)  # so that `commit` finds its place empty
        os.rename(aside, artifacts.scratch_of(final))
        return real(artifacts.scratch_of(final), final, **more)

    real = steps.commit
    steps.scratch_of = lambda final: final  # type: ignore[assignment]
    steps.commit = commit  # type: ignore[assignment]

    def fresh(final: Path) -> Path:
        final.mkdir(parents=True)
        return final

    steps.fresh_scratch = fresh  # type: ignore[assignment]


def manifest_first() -> None:
    """The manifest and the name are there before the files are."""
    from rl_core import artifacts

    rename = os.rename

    def piecemeal(source: Any, target: Any, **more: Any) -> None:
        source, target = Path(source), Path(target)
        if not target.name.startswith("step_"):
            rename(source, target, **more)
            return
        target.mkdir()
        names = [artifacts.MANIFEST, *(name for name in os.listdir(source) if name != artifacts.MANIFEST)]
        for name in names:
            rename(source / name, target / name)
        source.rmdir()

    os.rename = piecemeal  # type: ignore[assignment]


def step_not_restored() -> None:
    """The random draws begin anew: they are functions of a step that is counted from the resume."""
    from rl_core import ppo

    generate = ppo.Run.generate

    def from_zero(self: Any, prompts: Any, step: int, *args: Any, **more: Any) -> Any:
        return generate(self, prompts, step - self.first_step, *args, **more)

    ppo.Run.generate = from_zero  # type: ignore[method-assign]


def cursor_not_saved() -> None:
    """The prompts begin anew."""
    from rl_core import ppo
    from rl_core.data.prompts import Prompts

    restore, take, first = ppo.Run.restore, Prompts.take, [0]

    def restored(self: Any, artifact: Any) -> None:
        restore(self, artifact)
        first[0] = self.first_step

    def taken(self: Any, seed: int, cursor: int, count: int, *args: Any, **more: Any) -> Any:
        return take(self, seed, cursor - first[0] * count, count, *args, **more)

    ppo.Run.restore = restored  # type: ignore[method-assign]
    Prompts.take = taken  # type: ignore[method-assign]


MUTANTS: dict[str, tuple[Callable[[], None], Case]] = {
    "no rename": (no_rename, Case(0, "save: state", 2, 0, "self", "KILL")),
    "manifest first": (manifest_first, Case(0, "save: after rename", 2, 0, "self", "KILL")),
    "step not restored": (step_not_restored, Case(0, "update_actor", 2, 0, "self", "KILL")),
    "cursor not saved": (cursor_not_saved, Case(0, "update_critic", 2, 1, "agent", "KILL")),
}
"""Each with a case that must show it."""
