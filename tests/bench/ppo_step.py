"""PPO steps of a real model shape with random weights: seconds per phase, tokens/s/GPU, memory. Nothing is read or saved.

    python tests/bench/ppo_step.py --out FILE.json --shape qwen2-1.5b [--case NAME key=value …]… [--set key=value]…
    torchrun --standalone --nproc_per_node=2 tests/bench/ppo_step.py …

The loop is `rl_core.ppo.train` itself; responses always have the greatest length, and the reward is a function of their ids.
Each `--case` runs by itself in the same processes, with its settings on top of those of `--set`; the first is the baseline.
tokens/s/GPU = prompt and response tokens of a step / its seconds / ranks.
"""

import argparse
import gc
import json
import os
import shlex
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core import train as training
from rl_core.artifacts import Artifact
from rl_core.batching import BatchPlan
from rl_core.checkpoint.saver import Saver
from rl_core.config import Config, parse_config
from rl_core.data.prompts import Prompt
from rl_core.distributed import World, joined, set_timeouts
from rl_core.dry_run import try_largest_batch
from rl_core.groups import make_groups
from rl_core.metrics import RunLog
from rl_core.models import build
from rl_core.models.local import local
from rl_core.ppo import Run, train
from rl_core.rewards import Judgement
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.engine import RolloutEngine
from rl_core.scoring import Scorer


def _shape(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "tie_word_embeddings": tied,
    }  # fmt: skip


SHAPES = {
    "tiny": _shape(512, 64, 128, 2, 4, 2, True),
    "qwen2-1.5b": _shape(151936, 1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": _shape(151936, 2048, 11008, 36, 16, 2, True),
    "qwen2-7b": _shape(152064, 3584, 18944, 28, 28, 4, False),
}
KEPT = (
    "actor/loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm",
    "training/rollout_logprobs_abs_diff_mean",
)  # fmt: skip


class Synthetic:
    """Prompts of random ids, in place of a dataset."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(10, vocabulary - 10, (count, tokens), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, seed: int, offset: int, count: int, shuffle: bool) -> list[Prompt]:
        rows = (self._rows[number % len(self._rows)] for number in range(offset, offset + count))
        return [Prompt("", row, "", "", None, "", {}) for row in rows]


class Ids:
    """In place of a tokenizer: a response's text is its ids."""

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


class Unsaved(Run):
    """Checkpoints of such models are larger than some disks."""

    def save(self, steps_done: int) -> None:
        """Nothing."""

    def must_stop(self, step_seconds: float) -> bool:
        """Never."""
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-1.5b")
    parser.add_argument("--prompt_tokens", type=int, default=107)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--fixed_responses", action="store_true", help="random ids instead of a rollout: the same on any ranks")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--case", action="append", nargs="+", default=[], metavar="NAME KEY=VALUE")
    options = parser.parse_args()
    build._load = _fill  # type: ignore[assignment]
    if options.fixed_responses:
        RolloutEngine.generate = _fixed  # type: ignore[method-assign]
    cases = options.case or [["baseline"]]
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch) / "base"
        transformers.Qwen2Config(**SHAPES[options.shape], max_position_embeddings=32768).save_pretrained(base)
        first = _config(base, options, [])
        with joined(first.launch) as world:
            report = {
                "command": shlex.join([Path(sys.executable).name, *sys.argv]),
                "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
                "ranks": world.size, "torch": torch.__version__, "transformers": transformers.__version__,
                "shape": options.shape, "warm_up_steps": options.warm, "measured_steps": options.steps, "cases": {},
            }  # fmt: skip
            for name, *settings in cases:
                result = _measure(_config(base, options, settings).settled(world.size), base, options, world, Path(scratch))
                if world.is_main:
                    report["cases"][name] = {"settings": settings, **result}  # type: ignore[index]
                    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                    print(f"{name}: {json.dumps(result)}", flush=True)


def _config(base: Path, options: argparse.Namespace, settings: list[str]) -> Config:
    values = {
        "model": {"name_or_path": str(base), "torch_dtype": "bfloat16"},
        "data": {"source": {"kind": "files", "path": "none"}},
        "reward": {"kind": "function", "path": "none.py"},
        "rollout": {"max_new_tokens": 256, "batch_size": 256},
        "trainer": {
            "max_steps": options.warm + options.steps, "train_batch_size": 64, "ppo_mini_batch_size": 16,
            "per_device_train_batch_size": 8,
        },
    }  # fmt: skip
    return parse_config(values, [*options.set, *settings])


def _measure(config: Config, base: Path, options: argparse.Namespace, world: World, scratch: Path) -> dict[str, Any]:
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    groups = make_groups(config, config.roles(), world.device.type)
    set_timeouts(config.launch.dist_timeout_s)
    plan, total = BatchPlan.of(config), options.warm + options.steps
    artifact = Artifact(base, {"digest": "random"})
    models = training._models(config, artifact, groups, world, Ids(), total, plan)
    actor, critic, reference, judge, engine = models
    built = torch.cuda.memory_allocated() / 2**30 if on_gpu else 0.0
    prompts = Synthetic(plan.prompts * total, options.prompt_tokens, SHAPES[options.shape]["vocab_size"])
    output = Path(tempfile.mkdtemp(dir=scratch))
    scorer = Scorer(config, Ids(), world, None if judge else _reward, judge)
    run = Unsaved(  # what is None or stands in for something is not asked for in a run that neither saves nor ends early
        config=config, world=world, plan=plan, prompts=prompts, eval_prompts=prompts, tokenizer=Ids(), stop_ids=set(),  # type: ignore[arg-type]
        score=scorer, actor=actor, critic=critic, reference=reference, engine=engine, checkpoints=None, deadline=None,  # type: ignore[arg-type]
        saver=Saver(None, background=False), stopping=lambda: False, total_steps=total, key="bench", identity={},  # type: ignore[arg-type]
        kl_coef=config.algorithm.kl_coef, log=RunLog(output, world, total, 0),
    )  # fmt: skip
    if on_gpu:
        longest = options.prompt_tokens, config.rollout.max_new_tokens
        try:
            try_largest_batch(run.learners, plan, *longest, config, world.device)
        except torch.OutOfMemoryError as error:  # such a case comes last: what it holds is not given back
            return {"out_of_memory_in_the_trial": str(error).partition(".")[0], "gib_built": round(built, 2)}
    tried = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    train(run)
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0, built], device=world.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if not world.is_main:
        return {}
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][options.warm :]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if name.startswith(("timing_s/", "perf/"))}
    return {
        "tokens_per_s_per_gpu": round(mean["perf/throughput"], 1),
        "tokens": rows[0]["perf/total_num_tokens"],
        "seconds": {name.removeprefix("timing_s/"): round(value, 3) for name, value in mean.items() if "timing" in name},
        "gib_built": round(float(peak[1]), 2),
        "gib_tried": round(tried, 2),
        "gib_peak": round(float(peak[0]), 2),
        "metrics_of_last_step": {name: rows[-1].get(name) for name in KEPT},
    }


def _reward(prompts: list[Prompt], texts: list[str], ids: list[list[int]]) -> list[Judgement]:
    return [Judgement(zlib.crc32(text.encode()) % 1000 / 1000) for text in texts]


def _fixed(engine: RolloutEngine, prompts: list[list[int]], numbers: list[int], **settings: Any) -> RolloutBatch:
    """Responses that depend on the number of the sample and the step alone."""
    responses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number + 100_000 * settings["step"])
        vocabulary, length = engine.config.vocab_size, settings["max_new_tokens"]
        responses.append(torch.randint(10, vocabulary - 10, (length,), generator=generator).tolist())
    zeros = [[0.0] * len(response) for response in responses]
    return RolloutBatch.from_lists(prompts, responses, zeros, [True] * len(prompts), numbers, engine.device)


def _fill(tensors: dict[str, torch.Tensor], *_: Any) -> None:
    """Random weights, the same for actor, critic and reference, however they are spread."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if "norm" in name:
                local(tensor).fill_(1.0)
                continue
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.split(".", 1)[1].encode()))
            whole = torch.empty(tensor.shape, device=device).normal_(0.0, 0.02, generator=generator)
            if isinstance(tensor, DTensor):
                shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                whole = whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
            local(tensor).copy_(whole)


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
