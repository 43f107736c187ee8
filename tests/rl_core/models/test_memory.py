"""While a model is loaded, a rank's memory grows by little more than its shard: no rank ever holds the whole."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.checkpoint.convert import convert
from rl_core.groups import make_groups
from rl_core.memory import give_back
from rl_core.models.build import build_policy
from rl_core.models.source import ModelSource, load_tokenizer
from rl_core.models.tensors import model_tensors
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config
from tests.tiny import tiny_model

SIZES = {"vocab_size": 18432, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7}
"""120 MiB, untied 156. The largest tensor has 36: what has less than 32 leaves holes in glibc's heap, by chance more or less."""


def resident(key: str = "VmRSS") -> int:
    """Bytes of this process in memory (now, or at most: VmHWM)."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def growth(action: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes the process grows at most during `action`, and its result."""
    gc.collect()
    give_back()
    before = resident()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    except OSError:  # not allowed here: look often
        seen, done = [before], threading.Event()

        def look() -> None:
            while not done.wait(0.0005):
                seen.append(resident())

        watcher = threading.Thread(target=look)
        watcher.start()
        result = action()
        done.set()
        watcher.join()
        return max(seen) - before, result
    result = action()
    return resident("VmHWM") - before, result


def loaded(rank: int, warm: list[Path], directories: list[Path]) -> list[dict[str, int]]:
    settings, cpu = config(), torch.device("cpu")
    group = make_groups(settings, ["actor"], "cpu")["actor"]

    def build(directory: Path) -> Any:
        return build_policy(directory, settings, "actor", group, cpu, trainable=True)

    for directory in warm:  # imports and buffers of libraries
        build(directory)
    results = []
    for directory in directories:
        most, policy = growth(lambda directory=directory: build(directory))
        tensors = model_tensors(policy).values()
        results.append(
            {
                "growth": most,
                "shard": sum(tensor.to_local().nbytes for tensor in tensors),
                "largest": max(tensor.numel() * tensor.itemsize for tensor in tensors),
                "whole": sum(tensor.numel() * tensor.itemsize for tensor in tensors),
            }
        )
        del policy, tensors
    return results


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, int]]]:
    root = tmp_path_factory.mktemp("memory")
    directories: dict[str, list[Path]] = {"warm": [], "large": []}
    for size, settings in {"warm": {}, "large": SIZES}.items():
        for tie in (True, False):
            source = ModelSource(tiny_model(root / f"{size}-{tie}", tie=tie, **settings))
            base = root / f"{size}-{tie}-base"
            convert(source, load_tokenizer(source), base)
            directories[size] += [base, source.directory]
    return run_ranks(loaded, 2, directories["warm"], directories["large"])


@pytest.mark.parametrize("case", range(4), ids=["tied artifact", "tied safetensors", "untied artifact", "untied safetensors"])
def test_a_rank_grows_by_its_shard(measured: list[list[dict[str, int]]], case: int) -> None:
    for rank in measured:
        found = rank[case]
        most = 1.3 * found["shard"] + found["largest"]
        assert most < found["whole"], "the model is too small to tell"
        assert found["shard"] <= found["growth"] <= most
