"""A thousand flipped bytes and cut files, over all kinds of files of the store and of checkpoints: each is noticed before use.

They are asked for through the functions that `ppoflow run` itself uses: `tasks.store.find` in every stage, `Checkpoints.latest`
in the ranks, and MLflow's files through `files_of`. `PPOFLOW_DAMAGES` and `PPOFLOW_SEED` choose how many and which.
"""

import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from rl_core.artifacts import open_artifact
from rl_core.checkpoint.dcp import load_tensors, save_tensors
from rl_core.checkpoint.steps import Checkpoints
from rl_core.config import Config, parse_config
from rl_core.errors import BrokenArtifact, ModelError, StoreError
from rl_core.models.source import resolve
from tasks import convert_checkpoint, tokenize_dataset
from tasks.store import Key, find
from tests.pipeline import tiny_settings
from tests.registered import tiny_evaluation, tiny_policy

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
COUNT = int(os.environ.get("PPOFLOW_DAMAGES", "1000"))
SEED = int(os.environ.get("PPOFLOW_SEED", "20"))


@dataclass(frozen=True)
class Stored:
    """A committed directory, and how a run opens it: None if nothing whole is there."""

    path: Path
    open: Callable[[], Path | None]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stored]]:
    """Dataset, base model, policy, comparison and two checkpoints, made by what makes them in a run."""
    directory = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPOFLOW_HOME", str(directory / "home"))
        config = settings(directory)
        source = resolve(config.model)
        dataset_key, base_key = tokenize_dataset.key(config, source), convert_checkpoint.key(config, source)
        tokenize_dataset.tokenize(dataset_key, config, source)
        convert_checkpoint.convert(base_key, config, source)
        policy = tiny_policy("damage")
        evaluation = tiny_evaluation(policy, 0.5)
        checkpoints = Checkpoints(directory / "run" / "checkpoints", 2)
        for step in (1, 2):
            tensors = {"actor.weight": torch.full((40, 40), float(step)), "step": torch.tensor(step)}
            checkpoints.save(step, tensors, {"step": step, "identity": {"seed": 1}}, "k" * 64)
        keys = [
            dataset_key,
            base_key,
            *(Key(one.stage, one.key, one.open().manifest["components"]) for one in (policy, evaluation)),
        ]
        yield [stored_under(key) for key in keys] + [Stored(checkpoints.path(2), lambda: latest(checkpoints))]


def settings(directory: Path) -> Config:
    return parse_config(tiny_settings(directory / "input"))


def stored_under(key: Key) -> Stored:
    def opened() -> Path | None:
        artifact = find(key)
        return artifact and artifact.path

    return Stored(key.path, opened)


def latest(checkpoints: Checkpoints) -> Path | None:
    """The newest; None if it is passed over for the one before."""
    artifact = checkpoints.latest()
    assert artifact is not None
    return artifact.path if artifact.results["step"] == 2 else None


def damage(path: Path, chance: random.Random) -> str:
    """Flip a byte, or cut, in place; half of the flips set the time of modification back."""
    before, stat = path.read_bytes(), path.stat()
    kind = chance.choice(["flip", "flip, time set back", "cut"]) if before else "byte more"
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(chance.randrange(len(before)))
        elif kind == "byte more":
            file.write(b"\0")
        else:
            place = chance.randrange(len(before))
            file.seek(place)
            file.write(bytes([before[place] ^ chance.randrange(1, 256)]))
    if kind == "flip, time set back":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return kind


def test_every_damage_is_noticed_before_use(stored: list[Stored], caplog: pytest.LogCaptureFixture) -> None:
    print(f"PPOFLOW_DAMAGES={COUNT} PPOFLOW_SEED={SEED}")
    chance, unnoticed, seen = random.Random(SEED), [], Counter()
    kinds: dict[str, list[tuple[Stored, Path]]] = {}
    for one in stored:
        assert one.open() == one.path
        for file in sorted(path for path in one.path.rglob("*") if path.is_file()):
            kinds.setdefault(file.suffix or file.name, []).append((one, file))
    for number in range(COUNT):
        one, file = chance.choice(kinds[list(kinds)[number % len(kinds)]])
        before = file.read_bytes()
        kind = damage(file, chance)
        caplog.clear()
        found = one.open()
        seen[kind] += 1
        aside = next(one.path.parent.glob(f".{one.path.name}.broken-*"), None)
        if found is not None or aside is None or file.name not in caplog.text or one.path.exists():
            unnoticed.append(f"{number}: {kind} in {file}")
        if aside is not None:
            aside.rename(one.path)
        file.write_bytes(before)
    assert unnoticed == []
    assert all(one.open() == one.path for one in stored), "what was undone is whole"
    assert {".metadata", ".distcp", ".json", ".jsonl", ".safetensors", ".yaml", ".md", ".png"} <= set(kinds)
    assert set(seen) >= {"flip", "flip, time set back", "cut"}


class Planted:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def in_metadata(directory: Path, planted: Planted) -> None:
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    (directory / ".metadata").write_bytes(pickle.dumps(replace(metadata, planner_data=planted)))


def as_bytes_entry(directory: Path, planted: Planted) -> None:
    """As DCP itself saves an object: a pickle in a shard."""
    dcp.save({"a": torch.ones(2), "planted": planted}, checkpoint_id=directory, no_dist=True)


def in_place_of_a_tensor(directory: Path, planted: Planted) -> None:
    """The metadata still says that there is a tensor."""
    metadata: Metadata = pickle.loads((directory / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    with (directory / info.relative_path).open("wb") as file:
        torch.save(planted, file)
        length = file.tell()
    info.offset, info.length = 0, length
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("plant", [in_metadata, as_bytes_entry, in_place_of_a_tensor])
@pytest.mark.parametrize("name", ["a", "planted"])
def test_a_planted_pickle_is_never_run(tmp_path: Path, plant: Callable[[Path, Planted], None], name: str) -> None:
    directory, ran = tmp_path / "t", tmp_path / "ran"
    save_tensors({"a": torch.ones(2)}, directory)
    plant(directory, Planted(ran))
    with pytest.raises((BrokenArtifact, StoreError, ModelError)):
        load_tensors({name: torch.zeros(2)}, directory, strict=False)
    assert not ran.exists()


def test_the_planted_pickles_would_run(tmp_path: Path) -> None:
    """DCP's own reader runs the first two: so the test above can fail."""
    for plant in (in_metadata, as_bytes_entry):
        directory, ran = tmp_path / plant.__name__, tmp_path / f"{plant.__name__} ran"
        save_tensors({"a": torch.ones(2)}, directory)
        plant(directory, Planted(ran))
        dcp.load(
            {"a": torch.zeros(2)} | ({"planted": None} if plant is as_bytes_entry else {}), checkpoint_id=directory, no_dist=True
        )
        assert ran.exists()


def test_a_directory_under_another_key_is_not_taken_for_it(stored: list[Stored], tmp_path: Path) -> None:
    """Whole, but not what it is asked for."""
    policy = stored[2].path
    other = Key(policy.parent.name, "0" * 64, {})
    policy.rename(other.path)
    try:
        assert open_artifact(other.path).key == policy.name
        assert find(other) is None
    finally:
        next(policy.parent.glob(f".{other.value}.broken-*")).rename(policy)
    assert stored[2].open() == policy
