"""What each offload and checkpointing option costs and frees: one PPO-like step of a Qwen2-1.5B shape on one rank.

    PYTHONPATH=. python tests/bench/offload.py --out FILE.json [--tiny] [--strategy single fsdp] [--only NAME…]

A step scores the responses once (log-probabilities, no gradient) and then updates the policy once: two micro-batches, clipping,
AdamW. Weights are random, so nothing is read; forward and backward run in bfloat16, masters, gradients and moments are float32.
Each case says the bytes that it leaves on the GPU between steps (`idle`), the most that it takes (`peak`), and the seconds of
scoring and update. One process measures all cases, one after the other, and writes the file after each. `--tiny` tries the
script on a CPU, where no bytes are measured.
"""

import argparse
import gc
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_core.config.fsdp import FsdpConfig
from rl_core.models.local import local
from rl_core.models.offload import Offload, home_device
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import settle_buffers, shard, unit_classes

QWEN2_1_5B = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "reshard_after_forward: false": {"reshard_after_forward": False},
    "activation_checkpointing": {"activation_checkpointing": True},
    "activation_cpu_offload": {"activation_cpu_offload": True},
    "activation_checkpointing + activation_cpu_offload": {"activation_checkpointing": True, "activation_cpu_offload": True},
    "param_offload": {"param_offload": True},
    "optimizer_offload": {"optimizer_offload": True},
    "param_offload + optimizer_offload": {"param_offload": True, "optimizer_offload": True},
    "offload_policy": {"offload_policy": True},
    "all": {"offload_policy": True, "activation_checkpointing": True, "activation_cpu_offload": True},
}
MICRO_BATCHES, WARM_UP, TIMED, CLIP = 2, 1, 2, 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--strategy", nargs="+", default=["single", "fsdp"], choices=["single", "fsdp"])
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))
    rows, prompt, response = (4, 8, 8) if options.tiny else (8, 512, 512)
    result: dict[str, Any] = {
        "command": shlex.join(["PYTHONPATH=.", "python", *sys.argv]),
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
        },
        "shape": TINY if options.tiny else QWEN2_1_5B,
        "batch": {"responses": rows, "micro_batches": MICRO_BATCHES, "prompt_tokens": prompt, "response_tokens": response},
        "cases": [],
    }  # fmt: skip
    measure("warm-up", "single", {}, result, mesh, device)  # kernels, communicators: what only the first case would pay for
    for strategy in options.strategy:
        for name in options.only:
            case = measure(name, strategy, CASES[name], result, mesh, device)
            result["cases"].append(case)
            print(json.dumps(case), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def measure(
    name: str, strategy: Any, overrides: dict[str, Any], result: dict[str, Any], mesh: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    """Build the model, take some steps, and take it down again."""
    try:
        return _steps(name, FsdpConfig(strategy=strategy, **overrides), result, mesh, device)
    except torch.OutOfMemoryError as error:
        return {"strategy": strategy, "option": name, "out_of_memory": str(error).partition(". ")[0]}
    finally:
        gc.collect()  # FSDP's states hold each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _steps(name: str, settings: FsdpConfig, result: dict[str, Any], mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    before = allocated(device)
    policy, report = build(result["shape"], settings, mesh, device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, foreach=True)
    offload = Offload(policy, optimizer, settings, device)
    batch, seconds = make_batch(result, device), {"score": [], "update": []}  # type: ignore[var-annotated]
    for number in range(WARM_UP + TIMED):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = now(device)
        with offload.loaded(), torch.no_grad():
            old = [scores(policy, part) for part in batch]
        scored = now(device)
        with offload.loaded(optimizer=True):
            loss, norm = update(policy, optimizer, batch, old)
        updated = now(device)
        if number >= WARM_UP:
            seconds["score"].append(scored - start)
            seconds["update"].append(updated - scored)
        del old
    case: dict[str, Any] = {"strategy": settings.strategy, "option": name, "parameters": report.parameters}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
        case["gib"] = {"idle": round((allocated(device) - before) / 2**30, 2), "peak": round(peak / 2**30, 2)}
    case["seconds"] = {phase: round(statistics.median(each), 3) for phase, each in seconds.items()}
    return case | {"loss": loss, "grad_norm": norm}


def build(shape: dict[str, Any], settings: FsdpConfig, mesh: DeviceMesh, device: torch.device) -> tuple[PolicyModel, Any]:
    """As rl_core.models.build does, with random weights instead of loaded ones."""
    with torch.device("meta"):
        causal = Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
    policy = PolicyModel(causal)
    report = shard(policy, unit_classes(causal, settings.wrap_policy), settings, torch.bfloat16, mesh)
    policy.to_empty(device=home_device(settings, device))
    causal.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name in {name.rpartition(".")[0] for name, _ in causal.named_non_persistent_buffers()}:
            causal._init_weights(causal.get_submodule(name))
        for parameter in map(local, policy.parameters()):
            values = (
                torch.randn(parameter.shape, device=device).mul_(0.02) if parameter.dim() > 1 else torch.ones(parameter.shape)
            )
            parameter.copy_(values)
    settle_buffers(policy, settings, device)
    return policy, report


def make_batch(result: dict[str, Any], device: torch.device) -> list[tuple[Any, ...]]:
    """For each micro-batch what the policy takes, and advantages [B, R]."""
    sizes = result["batch"]
    rows, prompt, response = sizes["responses"], sizes["prompt_tokens"], sizes["response_tokens"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, result["shape"]["vocab_size"], (rows, prompt + response), generator=generator).to(device)
    advantages = torch.randn(rows, response, generator=generator).to(device)
    lengths = [torch.full((rows,), length, device=device) for length in (prompt, response)]
    parts = torch.arange(rows, device=device).chunk(MICRO_BATCHES)
    return [(ids[part], *(length[part] for length in lengths), response, advantages[part]) for part in parts]


def scores(policy: PolicyModel, part: tuple[Any, ...]) -> torch.Tensor:
    """Log-probabilities [B, R]."""
    return policy(*part[:4], 1.0, False)[0]


def update(
    policy: Any, optimizer: torch.optim.Optimizer, batch: list[tuple[Any, ...]], old: list[torch.Tensor]
) -> tuple[float, float]:
    """One optimizer step on the clipped surrogate (PPO, eq. 7): loss and gradient norm."""
    total = 0.0
    for number, (part, reference) in enumerate(zip(batch, old, strict=True), start=1):
        ratio, advantages = (scores(policy, part) - reference).exp(), part[4]
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -gain.mean() / len(batch)
        policy.set_requires_gradient_sync(number == len(batch))
        loss.backward()
        total += loss.item()
    norm: Any = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, float(norm.full_tensor())


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
