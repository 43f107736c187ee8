"""Metrics of a step under verl's names, the run's log lines, and the files that they are kept in."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core import memory, stall
from rl_core.distributed import World
from rl_core.rollout.batch import RolloutBatch

if TYPE_CHECKING:
    from rl_core.scoring import Scores


class Timer:
    """Seconds per phase of one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase. On a GPU its kernels are waited for; on the CPU what it freed is given back."""
        start = time.perf_counter()
        with stall.phase(phase, self._step):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            else:
                memory.give_back()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start


class StepStatistics:
    """What the ranks add up during a step; `merge` makes the metrics from it.

    What all ranks know alike (`per_sample`, `token_mean`, `rollout`) counts on rank 0 only; parts of means and what learners say
    are added up over the ranks that report them.
    """

    def __init__(self, is_main: bool) -> None:
        self._is_main = is_main
        self.samples: dict[str, list[float]] = {}
        self.sums: dict[str, tuple[float, float]] = {}

    def per_sample(self, name: str, values: torch.Tensor | Iterable[float]) -> None:
        """One number per response; becomes `name/mean`, `/max`, `/min`."""
        if self._is_main:
            values = values.tolist() if isinstance(values, torch.Tensor) else list(values)
            self.samples.setdefault(name, []).extend(map(float, values))

    def mean(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """A part of a mean: its sum and the number of things summed."""
        before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before[0] + float(total), before[1] + float(count))

    def token_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """The mean over response tokens of `values` [B, R] where `mask` [B, R]."""
        if self._is_main:
            self.mean(name, torch.where(mask, values.detach().double(), 0.0).sum(), mask.sum())

    def means(self, prefix: str, sums: Mapping[str, torch.Tensor], count: torch.Tensor) -> None:
        """Parts of several means over the same things."""
        for name, total in sums.items():
            self.mean(f"{prefix}/{name}", total, count)

    def optimizer_step(self, prefix: str, values: Mapping[str, float]) -> None:
        """What a learner says of an optimizer step, the same on all ranks; becomes the mean over the step's optimizer steps."""
        for name, value in values.items():
            self.mean(f"{prefix}/{name}", value, 1)

    def rollout(self, batch: RolloutBatch, scores: "Scores", logprobs: torch.Tensor) -> None:
        """Lengths and scores per response, and how far the rollout's log-probabilities are from the trainer's."""
        self.per_sample("critic/score", scores.total)
        for name, values in scores.metrics.items():
            self.per_sample(name, values)
        self.per_sample("prompt_length", batch.prompt_length)
        self.per_sample("response_length", batch.response_length)
        self.per_sample("response_length/truncated", batch.truncated)
        self.token_mean("training/rollout_logprobs_abs_diff_mean", (batch.logprobs - logprobs).abs(), batch.mask)

    def merge(self, world: World, timer: Timer) -> dict[str, float]:
        """The step's metrics over all ranks on rank 0, {} elsewhere (a collective).

        `perf/throughput` is prompt and response tokens per second and rank; a phase's time is that of its slowest rank.
        """
        parts = world.gather((self.sums, timer.seconds, memory.peak()))
        if not parts:
            return {}
        metrics: dict[str, float] = {}
        for name in sorted({name for sums, *_ in parts for name in sums}):
            total, count = (sum(sums[name][i] for sums, *_ in parts if name in sums) for i in (0, 1))
            metrics[name] = total / count if count else 0.0
        samples = dict(self.samples)
        metrics["response_length/clip_ratio"] = _average(samples.pop("response_length/truncated"))
        for name, values in samples.items():
            metrics |= {f"{name}/mean": _average(values), f"{name}/max": max(values), f"{name}/min": min(values)}
        longest = {phase: max(timed.get(phase, 0.0) for _, timed, _ in parts) for phase in timer.seconds}
        tokens, seconds = sum(samples["prompt_length"]) + sum(samples["response_length"]), timer.total()
        return metrics | {
            **{f"timing_s/{phase}": value for phase, value in longest.items()},
            "timing_s/step": seconds,
            "perf/time_per_step": seconds,
            "perf/total_num_tokens": tokens,
            "perf/throughput": tokens / seconds / world.size,
            "perf/max_memory_gb": max(peak for *_, peak in parts) / 2**30,
        }


def mean_and_deviation(values: torch.Tensor) -> tuple[float, float]:
    """Mean and population standard deviation of [B] values."""
    exact = values.double()
    return float(exact.mean()), float(exact.std(correction=0))


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


class RunLog:
    """The files and lines of a run; only rank 0 writes."""

    def __init__(self, directory: Path, world: World, total_steps: int, first_step: int, progress: bool = True) -> None:
        """Steps from `first_step` on that a killed predecessor logged but did not save are dropped: they come again."""
        self._files = {name: directory / f"{name}.jsonl" for name in ("metrics", "samples")}
        self._writes = world.is_main
        self._total, self._progress = total_steps, progress
        self._seconds: list[float] = []
        if self._writes:
            for file in self._files.values():
                _drop_steps_from(file, first_step)

    def line(self, text: str) -> None:
        """A line of the log, at once."""
        if self._writes:
            print(text, flush=True)

    def step(self, step: int, metrics: Mapping[str, float], samples: Iterable[Mapping[str, Any]]) -> None:
        """Append a step's metrics and sample responses, and show how far the run is."""
        if not self._writes:
            return
        _append(self._files["metrics"], [{"step": step, **metrics}])
        _append(self._files["samples"], [{"step": step, **sample} for sample in samples])
        if not self._progress:
            return
        self._seconds = [*self._seconds, metrics["perf/time_per_step"]][-10:]
        pace = sum(self._seconds) / len(self._seconds)
        done, width = step + 1, 20
        bar = "█" * (width * done // self._total)
        left = pace * (self._total - done)
        self.line(
            f"{bar:░<{width}} {done}/{self._total} | reward {metrics['critic/score/mean']:.3f} | "
            f"response {metrics['response_length/mean']:.1f} tokens | {pace:.1f} s/step | "
            f"{metrics['perf/throughput']:.0f} tokens/s/rank | {_duration(left)} left"
        )


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _drop_steps_from(path: Path, step: int) -> None:
    if not path.exists():
        return
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")  # the last may be half a line
    kept = [line for line in lines if (done := _step_of(line)) is not None and done < step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


def _step_of(line: str) -> int | None:
    """None for a line that a full or damaged disk left behind: it is dropped, since a log is no reason not to go on."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
