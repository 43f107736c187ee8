"""`ppoflow store gc`: deletes what nothing needs, also while flows run.

It deletes what it finds under the locks of those who write, and only while nobody can begin to use it (`tasks.store_use`) or
register it (the registry's lock). Everything is renamed first, so that nothing half deleted is ever taken for whole.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from shutil import rmtree

from rl_core.errors import StoreError
from rl_core.home import home
from rl_core.locks import tried
from tasks.store_contents import LEFT, Item, artifacts, freed, leavings, run_directories
from tasks.store_references import references, registered
from tasks.store_use import collecting


@dataclass(frozen=True)
class Collected:
    """What was deleted, or would be."""

    items: list[Item]
    freed: int
    """Bytes given back: less than the items' sizes where MLflow keeps some of the files."""


def collect(older_than_s: float, dry_run: bool = False) -> Collected:
    """Delete what dead writers left and what was set aside, of whatever age; and the artifacts that no registered version, no
    unfinished run and no living process needs, and the finished runs of which no policy is registered, if they have not been used
    for `older_than_s` seconds.

    Args:
        dry_run: delete nothing.

    Raises:
        RegistryError: MLflow does not tell what is registered; nothing was deleted.
        StoreError: something could not be deleted.
    """
    from tasks.mlflow_registry import registry_lock

    doomed: list[tuple[Item, Path]] = []
    with registry_lock(), collecting(home() / "store"):
        versions, runs, stored = registered(), run_directories(), artifacts()
        needed = references(stored, runs, versions, forget_dead=not dry_run)
        old = (item for item in [*stored, *runs] if item.idle_s >= older_than_s and item.name not in needed)
        for item in [*leavings(), *(item for item in old if item.state in ("committed", "damaged", "finished"))]:
            with _alone(item) as alone:
                if alone and item.path.exists():
                    doomed.append((item, item.path if dry_run else _out_of_the_way(item)))
    collected = Collected([item for item, _ in doomed], freed(path for _, path in doomed))
    if not dry_run:
        for _, path in doomed:
            _delete(path)
        for folder in {lock.parent for item, _ in doomed for lock in item.locks if lock.name.startswith(".")}:
            _delete_locks(folder)
    return collected


@contextmanager
def _alone(item: Item) -> Iterator[bool]:
    """Hold the item's locks if nobody else holds any of them; the value is whether that is so."""
    with ExitStack() as stack:
        # Those inside of a run directory are made by its ranks; where there is none there are no ranks.
        locks = (lock for lock in item.locks if lock.name.startswith(".") or lock.exists())
        yield all(stack.enter_context(tried(lock)) for lock in locks)


def _out_of_the_way(item: Item) -> Path:
    """Under a name that no writer uses: once the locks are free another may write at the old one."""
    if item.state == "set aside":
        return item.path
    left = LEFT.fullmatch(item.path.name)
    name = left[1] if left else item.path.name
    for number in count():
        aside = item.path.with_name(f".{name}.broken-{number}")
        if not aside.exists():
            item.path.rename(aside)
            return aside
    raise AssertionError


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # a training that has begun meanwhile clears up, too
        rmtree(path, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be deleted ({error.strerror}). Is it yours? What is left of it is unused.") from error


def _delete_locks(folder: Path) -> None:
    """Of what is gone."""
    for lock in folder.glob(".*.lock"):
        key = lock.name[1:].removesuffix(".lock")
        with tried(lock) as alone:
            if alone and not (folder / key).exists() and not any(path != lock for path in folder.glob(f".{key}.*")):
                lock.unlink()
