"""Tokens/s of the rollout engine on real model shapes with random weights, beside transformers' `generate`. Saves nothing.

    python tests/bench/rollout.py --out FILE.json --shape qwen2-1.5b [--rows 128] [--new 128] [--ragged 1024] [--generate dynamic]

Full: `rows` prompts of `prompt` tokens, `new` tokens for each. Ragged: so many prompts, limits log-uniform in 16 … 1,024, `rows`
at a time; beside it as many prompts with the mean of those limits each. End tokens: none. "Roof" is the time that the weights and
cache (at the mean length) take at 4.3 TB/s, each step.
"""

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from rl_core.rollout import engine as engines
from rl_core.rollout.engine import RolloutEngine

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("Qwen2", {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "smollm2-135m": ("Llama", {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen2-1.5b": ("Qwen2", {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-7b": ("Qwen2", {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}),
}  # fmt: skip
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time
"""On a CPU the seconds of the process, with one thread: machines are shared."""
BANDWIDTH = 4.3e12
"""Bytes/s of a device copy on an H200."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-1.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--ragged", type=int, default=0)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--generate", nargs="*", default=[], choices=("dynamic", "static"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        engine = _engine(Path(scratch), options.shape, getattr(torch, options.dtype), device)
        report: dict[str, Any] = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
            "torch": torch.__version__, "transformers": transformers.__version__, "shape": options.shape,
            "dtype": options.dtype, "results": {},
        }  # fmt: skip

        def note(name: str, result: dict[str, Any]) -> None:
            report["results"][name] = result
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {json.dumps(result)}", flush=True)

        prompts = _prompts(max(options.rows, options.ragged), options.prompt, engine.config.vocab_size)
        full = prompts[: options.rows], [options.new] * options.rows
        note("start", _timed(engine, *full, options) | {"compile_and_capture_s": round(engine.startup_seconds, 2)})
        best = max((_timed(engine, *full, options) for _ in range(options.repeat)), key=lambda made: made["tokens_per_s"])
        roof = _roof(engine, options.rows, options.prompt + options.new / 2, best) if device == "cuda" else {}
        note("full", best | roof)
        if options.profile:
            _profile(engine, full, options)
        if options.ragged:
            limits = _limits(options.ragged, 16, options.longest)
            mean = round(sum(limits) / len(limits))
            many = prompts[: options.ragged]
            _timed(engine, many[: options.rows], [options.longest, 16] * (options.rows // 2), options)  # room, and graphs
            ragged = _timed(engine, many, limits, options)
            even = _timed(engine, many, [mean] * len(many), options)
            note("even", even)
            note("ragged", ragged | {"of_even": round(ragged["tokens_per_s"] / even["tokens_per_s"], 3)})
        for kind in options.generate:
            note(f"generate {kind}", _transformers(engine, *full, options, kind))
            if options.ragged and device == "cpu":  # minutes on a GPU
                note(f"generate {kind}, ragged", _transformers(engine, many, limits, options, kind))
        if device == "cuda":
            note("memory", {"gib_peak": round(torch.cuda.max_memory_allocated() / 2**30, 2)})


def _engine(scratch: Path, shape: str, dtype: torch.dtype, device: str) -> RolloutEngine:
    family, sizes = SHAPES[shape]
    getattr(transformers, f"{family}Config")(**sizes, max_position_embeddings=32768).save_pretrained(scratch / "base")
    engine = RolloutEngine(scratch / "base", dtype, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in engine.model.state_dict().items():
            tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02)
    engine.synced = True
    return engine


def _prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    return torch.randint(10, vocabulary, (count, tokens), generator=torch.Generator().manual_seed(0)).tolist()


def _limits(count: int, low: int, high: int) -> list[int]:
    """Log-uniform in low … high, in no order."""
    shares = torch.rand(count, generator=torch.Generator().manual_seed(1))
    return [round(low * math.exp(share * math.log(high / low))) for share in shares.tolist()]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(engine: RolloutEngine, prompts: list[list[int]], limits: list[int], options: argparse.Namespace) -> dict[str, Any]:
    _synchronize()
    began = CLOCK()
    made = engine.generate(
        prompts, list(range(len(prompts))), max_new_tokens=limits, temperature=1.0, seed=0, step=0, stop_ids=set(),
        batch_size=options.rows,
    )  # fmt: skip
    _synchronize()
    seconds = CLOCK() - began
    tokens = sum(limits)
    assert made.response_length.tolist() == limits
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1), **engine.last_seconds}


def _roof(engine: RolloutEngine, rows: int, length: float, made: dict[str, Any]) -> dict[str, Any]:
    config, model = engine.config, engine.model
    embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    weights = (sum(parameter.numel() for parameter in model.parameters()) - embedding) * model.dtype.itemsize
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = rows * length * config.num_hidden_layers * 2 * config.num_key_value_heads * width * model.dtype.itemsize
    step = (weights + cache) / BANDWIDTH
    decoding = made.get("decode_s") or made["seconds"]
    return {
        "ms_per_step": round(1000 * decoding / (made["tokens"] / rows), 3),
        "decode_tokens_per_s": round(made["tokens"] / decoding, 1),
        "roof_ms_per_step": round(1000 * step, 3),
        "of_roof": round(step / (decoding / (made["tokens"] / rows)), 3),
    }


def _transformers(
    engine: RolloutEngine, prompts: list[list[int]], limits: list[int], options: argparse.Namespace, kind: str
) -> dict[str, Any]:
    """`generate` on `rows` prompts after the others, each time until the longest of them has its tokens."""
    times = []
    for _ in range(options.repeat):
        _synchronize()
        began = CLOCK()
        for start in range(0, len(prompts), options.rows):
            ids = torch.tensor(prompts[start : start + options.rows], device=engine.device)
            most = max(limits[start : start + options.rows])
            engine.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, max_new_tokens=most,
                min_new_tokens=most, pad_token_id=0, eos_token_id=None, cache_implementation=kind,
            )  # fmt: skip
        _synchronize()
        times.append(CLOCK() - began)
    return {"tokens": sum(limits), "seconds": round(min(times), 3), "tokens_per_s": round(sum(limits) / min(times), 1)}


def _profile(engine: RolloutEngine, full: tuple[list[list[int]], list[int]], options: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        _timed(engine, *full, options)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70), flush=True)


if __name__ == "__main__":
    engines.log.setLevel("INFO")
    main()
