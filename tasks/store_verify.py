"""`ppoflow verify`: reads every byte of committed directories again, and follows a registered version back to its training.

Everyday use trusts the digests of files that were not touched since they were hashed; this finds rot that left no time stamp.
Nothing is changed: the next `ppoflow run` sets aside what was found damaged and makes it again.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.artifacts import MANIFEST, damage, read_manifest
from rl_core.digests import digest_json
from rl_core.errors import BrokenArtifact, ConfigError
from rl_core.home import home
from tasks.store_references import KEY_TAG

PARTS = ("checkpoints/step_*", "policy", "dataset", "base")
"""Committed directories of a run directory; the latter two where the training was started by hand."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A committed directory whose files were all read."""

    what: str
    path: str
    files: int
    bytes: int
    digest: str = ""
    damage: list[str] = field(default_factory=list)
    """Sentences about files; none if it is whole."""
    absent: str = ""
    """Why there is nothing to read here, where that is no damage."""


def verify(targets: Sequence[str]) -> Iterator[Checked]:
    """Check what the targets name; nothing named: the whole store and all runs of the home.

    Args:
        targets: directories (artifacts, checkpoints, runs), beginnings of keys, and `models:/name@alias` or `models:/name/3`.

    Raises:
        ConfigError: there is nothing of that name.
        RegistryError: MLflow does not answer.
    """
    if not targets:
        yield from _all_of(_everything())
    for target in targets:
        if target.startswith("models:"):
            yield from _version(target)
        else:
            yield from _all_of(_named(target))


def _everything() -> list[tuple[str, Path]]:
    stored = [path for path in sorted((home() / "store").glob("[!.]*/[!.]*")) if path.is_dir()]
    runs = sorted((home() / "runs").glob("[!.]*"))
    return [(f"{path.parent.name} {path.name[:8]}", path) for path in stored] + [part for run in runs for part in _parts(run)]


def _named(target: str) -> list[tuple[str, Path]]:
    path = Path(target).absolute()
    if (path / MANIFEST).is_file() or (path.is_dir() and home() / "store" in path.parents[1:2]):
        return [(target, path)]
    found = _parts(path) if path.is_dir() else [(what, path) for what, path in _everything() if _is_of(path, target)]
    if not found:
        raise ConfigError(
            f"WHAT: {target!r} is neither a committed directory, nor the beginning of a key under {home()}, nor "
            "models:/name@alias or models:/name/3. `ppoflow store ls` says what there is."
        )
    return found


def _is_of(path: Path, key: str) -> bool:
    return any(part.startswith(key) for part in path.relative_to(home()).parts[1:3])


def _parts(run: Path) -> list[tuple[str, Path]]:
    paths = (path for pattern in PARTS for path in sorted(run.glob(pattern)) if path.is_dir())
    return [(f"run {run.name[:8]} {path.name}", path) for path in paths]


def _all_of(directories: list[tuple[str, Path]]) -> Iterator[Checked]:
    for what, path in directories:
        checked = _checked(what, path)
        if not checked.damage or path.exists():  # else an old checkpoint, deleted meanwhile
            yield checked


def _checked(what: str, path: Path, expected: str | None = None) -> Checked:
    """Read it all; in the store also compare it with its key.

    Args:
        expected: the digest that it must have.
    """
    problems = damage(path)
    try:
        manifest = read_manifest(path)
    except BrokenArtifact:
        return Checked(what=what, path=str(path), files=0, bytes=0, damage=problems)
    if home() / "store" in path.parents[1:2]:
        problems += _wrong_place(path, manifest)
    if expected is not None and manifest["digest"] != expected:
        problems.append(f"its digest is {manifest['digest']}, the version says {expected}")
    return Checked(
        what=what,
        path=str(path),
        files=len(manifest["files"]),
        bytes=sum(entry["size"] for entry in manifest["files"].values()),
        digest=manifest["digest"],
        damage=problems,
    )


def _wrong_place(path: Path, manifest: dict[str, Any]) -> Iterator[str]:
    if (manifest["kind"], manifest["key"]) != (path.parent.name, path.name):
        yield f"it is {manifest['kind']}/{manifest['key']} under another's name"
    if manifest["components"] and digest_json(manifest["components"]) != manifest["key"]:
        yield "its key is not the sha256 of its components"


def _version(uri: str) -> Iterator[Checked]:
    """The registered files, then what they came from, as far as it is here: policy, run, dataset, base model, comparison."""
    from tasks.environment import prepare
    from tasks.mlflow_registry import digest_of, find_version, registry

    match = re.fullmatch(r"models:/([^/@]+)[@/]([^/@]+)", uri)
    if match is None:
        raise ConfigError(f"{uri} is no model of MLflow's registry. Write models:/name@champion or models:/name/3.")
    prepare()
    with registry(f"look up {uri}") as client:
        from tasks.mlflow_versions import registered_files

        version = find_version(client, match[1], match[2])
        digest = digest_of(version)
        with registered_files(client, version) as files:
            yield _checked(f"models:/{version.name}/{version.number}", files, digest)
    keys = {found[1]: value for tag, value in version.tags.items() if (found := KEY_TAG.fullmatch(tag))}
    digests = {stage: version.tags.get(f"ppoflow.{stage}.digest", "") for stage in keys}
    for stage, key in keys.items():
        what, path = f"{stage} {key[:8]}", home() / "store" / stage / key
        if not path.exists():
            yield Checked(what=what, path=str(path), files=0, bytes=0, digest=digests[stage], absent="it is not in this store")
            continue
        checked = _checked(what, path, digest if stage == "train_policy" else digests[stage])
        if not checked.damage:
            checked.damage.extend(_other_lineage(stage, path, digests))
        yield checked
        if stage == "train_policy" and not checked.damage:
            yield from _run(path)


def _other_lineage(stage: str, path: Path, digests: dict[str, str]) -> Iterator[str]:
    """Where an artifact says that it came from something else than the version says."""
    components = read_manifest(path)["components"]
    if stage == "train_policy":
        for name, source in (("run.dataset", "tokenize_dataset"), ("run.base", "convert_checkpoint")):
            if name in components and components[name] != digests.get(source):
                yield f"it was made from {name.removeprefix('run.')} {components[name]}, the version says {digests.get(source)}"
    if stage == "evaluate_policy":
        compared = json.loads((path / "report.json").read_text(encoding="utf-8"))["digests"]["policy"]
        if compared != digests.get("train_policy"):
            yield f"it compares the policy {compared}, the version says {digests.get('train_policy')}"


def _run(policy: Path) -> Iterator[Checked]:
    """What the ranks themselves exported, and the checkpoint that it was exported from."""
    manifest = read_manifest(policy)
    step, run = manifest["results"]["step"], home() / "runs" / manifest["results"]["run_key"]
    exported, checkpoint = run / "policy", run / "checkpoints" / f"step_{step:06d}"
    try:
        written = read_manifest(exported)
    except BrokenArtifact:
        written = None
    what = f"run {run.name[:8]} policy"
    if written is None or written["results"]["step"] != step:
        reason = "it has gone on since" if written is not None else "its directory is not here"
        yield Checked(what=what, path=str(exported), files=0, bytes=0, absent=reason)
        return
    checked = _checked(what, exported)
    checked.damage.extend(
        f"{name} is not what the stored policy has"
        for name, entry in written["files"].items()
        if manifest["files"].get(name) != entry
    )
    yield checked
    if checkpoint.exists():
        checked = _checked(f"run {run.name[:8]} {checkpoint.name}", checkpoint)
        if not checked.damage and checked.digest != written["key"]:
            checked.damage.append(f"the policy was exported from another: {written['key']}")
        yield checked
