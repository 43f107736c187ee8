"""What runs under `PPOFLOW_HOME`, as its files and locks tell: no server is asked, and neither torch nor Prefect is imported.

A run is *running* while somebody holds its locks (they die with their holder), *finished* once the policy of its last step is
exported, else *stopped*: the command that began it goes on from its last checkpoint.
"""

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rl_core.artifacts import MANIFEST
from rl_core.errors import ConfigError
from rl_core.home import home
from tasks.lines import rows

WINDOW = 10
"""Steps over which reward and speed are means."""
TAIL_BYTES = 200_000
"""Of `metrics.jsonl`, read from its end: some hundred steps, whatever the length of the run."""
State = Literal["running", "stopped", "finished"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    """Steps done in it."""
    age_s: float


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One training. What is not known yet is None."""

    key: str
    """sha256; the name of its directory."""
    name: str
    """`registry.name` of its configuration."""
    model: str | None
    state: State
    holder: str | None
    """Process and host that train it."""
    step: int
    """Steps done, those since the last checkpoint included."""
    steps: int | None
    """Steps asked for."""
    reward: float | None
    """Mean score over the last `WINDOW` steps."""
    reward_change: float | None
    """That minus the mean over the `WINDOW` steps before."""
    rewards: list[float]
    """Mean score of each of the last steps, oldest first."""
    s_per_step: float | None
    """Seconds per step, mean over the last `WINDOW`; validation and saving are not in it."""
    tokens_per_s: float | None
    """Prompt and response tokens per second of all ranks together."""
    left_s: float | None
    """Seconds that the steps still to make take at that speed; of a stopped run, from its checkpoint on."""
    last_step_age_s: float | None
    checkpoint: Checkpoint | None
    bytes: int
    """On disk."""
    path: str


def runs() -> list[RunStatus]:
    """All runs of the home: running ones first, then the one that was written last."""
    directories = [path for path in (home() / "runs").glob("[!.]*") if path.is_dir()]
    found = [(_written(directory), status_of(directory)) for directory in directories]
    return [status for _, status in sorted(found, key=lambda pair: (pair[1].state != "running", -pair[0]))]


def find_runs(name: str | None) -> list[RunStatus]:
    """The runs that a user means by the beginning of a key, by `registry.name`, or by a run directory anywhere; None: all.

    Raises:
        ConfigError: there is none.
    """
    if name is not None and (Path(name) / "metrics.jsonl").is_file():
        return [status_of(Path(name).absolute())]
    every = runs()
    found = [run for run in every if name is None or run.name == name or run.key.startswith(name)]
    if name is not None and not found:
        known = ", ".join(f"{run.name} ({run.key[:8]})" for run in every[:10]) or "none"
        raise ConfigError(f"RUN: there is no run {name!r} under {home() / 'runs'}; there are: {known}.")
    return found


def status_of(directory: Path) -> RunStatus:
    """The run in a run directory."""
    holder, config, asked = _holder(directory), _config(directory), _steps(directory)
    metrics = list(rows(directory / "metrics.jsonl", TAIL_BYTES))
    step = max((int(row["step"]) + 1 for row in metrics), default=0)
    checkpoint = last_checkpoint(directory)
    exported = _exported_step(directory)
    finished = exported is not None and asked in (exported, None)
    state: State = "running" if holder else "finished" if finished else "stopped"
    rewards = _values(metrics, "critic/score/mean")
    now, before = _mean(rewards[-WINDOW:]), _mean(rewards[-2 * WINDOW : -WINDOW])
    pace = _mean(_values(metrics, "perf/time_per_step")[-WINDOW:])
    tokens = _mean(_values(metrics, "perf/total_num_tokens")[-WINDOW:])
    done = step if state == "running" else checkpoint.step if checkpoint else 0
    return RunStatus(
        key=directory.name,
        name=config.get("registry", {}).get("name") or directory.name[:8],
        model=config.get("model", {}).get("name_or_path"),
        state=state,
        holder=holder,
        step=step,
        steps=asked,
        reward=now,
        reward_change=None if now is None or before is None else now - before,
        rewards=rewards,
        s_per_step=pace,
        tokens_per_s=tokens / pace if tokens is not None and pace else None,
        left_s=None if state == "finished" or pace is None or asked is None else pace * max(asked - done, 0),
        last_step_age_s=_age(directory / "metrics.jsonl"),
        checkpoint=checkpoint,
        bytes=_size(directory),
        path=str(directory),
    )


def last_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest committed checkpoint of a run; that its files are whole is found out when it is loaded."""
    steps = [
        (int(path.parent.name.removeprefix("step_")), path)
        for path in (directory / "checkpoints").glob(f"step_*/{MANIFEST}")
        if path.parent.name.removeprefix("step_").isdecimal()
    ]
    for step, manifest in sorted(steps, reverse=True):
        age = _age(manifest)
        if age is not None:  # else rotated away just now
            return Checkpoint(step=step, age_s=age)
    return None


def stages() -> list[dict[str, str]]:
    """The artifacts of the store that are being made now, trainings apart (those are `runs`)."""
    making = []
    for lock in sorted((home() / "store").glob("*/.*.lock")):
        if lock.parent.name != "train_policy" and (who := held(lock)) is not None:
            making.append({"stage": lock.parent.name, "key": lock.name[1:].removesuffix(".lock"), "holder": who})
    return making


def held(lock: Path, shared: bool = False) -> str | None:
    """Who holds a lock of `rl_core.locks`; None: nobody. The lock is tried, and let go at once.

    Args:
        shared: whether its holders hold it shared, as ranks do.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR)  # NFS locks exclusively only what is open for writing
    except FileNotFoundError:
        return None
    except PermissionError:
        descriptor = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return "its ranks" if shared else os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
    finally:
        os.close(descriptor)
    return None


def _holder(directory: Path) -> str | None:
    """The flow that trains; ranks that outlive it, or were started by hand, count too."""
    return held(directory.with_name(f".{directory.name}.lock")) or held(directory / "ranks.lock", shared=True)


def _config(directory: Path) -> dict[str, Any]:
    """The configuration as the flow wrote it, unchecked: a release that knows other keys may have."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        config = yaml.load((directory / "config.yaml").read_text(encoding="utf-8"), loader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {name: value for name, value in config.items() if isinstance(value, dict)} if isinstance(config, dict) else {}


def _steps(directory: Path) -> int | None:
    """As the newest segment was planned (`tasks.runs`)."""
    segments = _json(directory / "segments.json")
    try:
        return int(segments[-1]["to_step"])
    except (LookupError, TypeError, ValueError):
        return None


def _exported_step(directory: Path) -> int | None:
    manifest = _json(directory / "policy" / MANIFEST)
    return manifest.get("results", {}).get("step") if isinstance(manifest, dict) else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _values(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in metrics if isinstance(row.get(name), int | float)]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _written(directory: Path) -> float:
    times = (_age(directory / name) for name in ("metrics.jsonl", "train.log", "config.yaml"))
    return -min((age for age in times if age is not None), default=float("inf"))


def _size(directory: Path) -> int:
    return sum(_blocks(Path(folder, name)) for folder, _, names in os.walk(directory) for name in names)


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:  # rotated away meanwhile
        return 0
