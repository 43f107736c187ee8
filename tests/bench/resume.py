"""A training of a real model shape that is killed (-9) and goes on, against one that was not: the same bits? What do saves cost?

    python tests/bench/resume.py --dataset DIR --out FILE.json [--shape qwen2-0.5b] [--steps 9] [--save_steps 3] [--set KEY=VALUE]

Two trainings of `rl_core.train` under torchrun from the same random weights, with `trainer.deterministic`, saved asynchronously
every `save_steps`. The second is killed, all its processes at once, when its log shows the step after `--kill_after`, and started
again. Compared are the digests of the last checkpoint (weights and AdamW's moments) and of the policy, and the metrics but times.
Seconds lost to a save are what the loop waited (`timing_s/save`); the share is of a step without a save.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
SHAPES = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2-0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
"""
TIMES = ("timing_s/", "perf/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="tokenized with tests.tiny's tokenizer (--make_dataset)")
    parser.add_argument("--make_dataset", action="store_true", help="only write --dataset, which needs `datasets`")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--save_steps", type=int, default=3)
    parser.add_argument("--kill_after", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path("resume-bench"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    work: Path = options.work.absolute()
    work.mkdir(parents=True)
    try:
        config = _inputs(work, options)
        if options.make_dataset:
            _dataset(config, options.dataset.absolute())
            return
        result = _measure(config, work, options)
    finally:
        shutil.rmtree(work)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


def _inputs(work: Path, options: argparse.Namespace) -> Path:
    """A base model of random weights, a reward and the configuration."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tests.tiny import tiny_prompts, tiny_tokenizer

    torch.manual_seed(0)
    shape = SHAPES["tiny" if options.make_dataset else options.shape]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**shape, max_position_embeddings=32768, eos_token_id=1), dtype=torch.bfloat16
        )
    model.save_pretrained(work / "model")
    del model
    tiny_tokenizer(work / "model")
    (work / "reward.py").write_text(REWARD, encoding="utf-8")
    values = {
        "model": {"name_or_path": str(work / "model")},
        "data": {"source": {"kind": "files", "path": str(tiny_prompts(work / "prompts.jsonl", 512))}, "max_prompt_length": 128},
        "reward": {"kind": "function", "path": str(work / "reward.py"), "timeout_s": None},
        "rollout": {"max_new_tokens": 256, "batch_size": 256},
        "trainer": {
            "max_steps": options.steps, "train_batch_size": 256, "ppo_mini_batch_size": 64, "per_device_train_batch_size": 16,
            "deterministic": True,
        },
        "checkpoint": {"save_steps": options.save_steps, "keep": 2},
    }  # fmt: skip
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _dataset(config: Path, target: Path) -> None:
    from rl_core.config import load_config
    from rl_core.distributed import World
    from rl_core.inputs import prepare

    dataset, _ = prepare(None, None, load_config(config, []), config.parent / "inputs", World(0, 1, torch.device("cpu")))
    shutil.copytree(dataset.path, target)


def _measure(config: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    whole, killed = work / "whole", work / "killed"
    seconds = {"whole": _train(config, whole, options)}
    expected, rows = _digests(whole, options.steps), _rows(whole)
    base = whole / "base"
    size = sum(path.stat().st_size for path in (whole / "checkpoints" / f"step_{options.steps:06d}").rglob("*.distcp"))
    shutil.rmtree(whole / "checkpoints")  # such checkpoints are large
    shutil.rmtree(whole / "policy")
    seconds["until the kill"] = _train(config, killed, options, base, kill_after=options.kill_after)
    there = sorted(path.name for path in (killed / "checkpoints").glob("step_*"))
    seconds["after it"] = _train(config, killed, options, base)
    actual = _digests(killed, options.steps)
    same_rows = [[(k, v) for k, v in row.items() if not k.startswith(TIMES)] for row in rows] == [
        [(k, v) for k, v in row.items() if not k.startswith(TIMES)] for row in _rows(killed)
    ]
    # A save that begins at the end of a step is waited for in the next one, before its update.
    after = set(range(options.save_steps, options.steps, options.save_steps))
    lost = [row["timing_s/save"] for row in rows if row["step"] in after]
    plain = [row["perf/time_per_step"] for row in rows[1:] if row["step"] not in after]
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ranks": options.ranks, "torch": torch.__version__, "shape": options.shape, "steps": options.steps,
        "killed_after_step": options.kill_after, "committed_at_the_kill": there,
        "bit_identical": {name: actual[name] == digest for name, digest in expected.items()} | {"metrics": same_rows},
        "digests": expected,
        "checkpoint_GB": round(size / 1e9, 3),
        "seconds_of_a_step_without_save": round(statistics.median(plain), 3),
        "seconds_lost_by_an_async_save": [round(value, 4) for value in lost],
        "seconds_of_a_step_after_a_save": [round(row["perf/time_per_step"], 3) for row in rows if row["step"] in after],
        "share_of_a_step_lost": round(statistics.median(lost) / statistics.median(plain), 4),
        "seconds_of_steps": [round(row["perf/time_per_step"], 3) for row in rows],
        "seconds": seconds,
        "phases_of_the_last_step": {name[9:]: round(value, 3) for name, value in rows[-1].items() if "timing_s/" in name},
    }  # fmt: skip


def _train(
    config: Path, output: Path, options: argparse.Namespace, base: Path | None = None, kill_after: int | None = None
) -> float:
    began = time.perf_counter()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}", "-m", "rl_core.train",
        "--config_path", str(config), "--output_dir", str(output), "--dataset", str(options.dataset.absolute()),
        *(["--base", str(base)] if base else []), *[f"--set={setting}" for setting in options.set],
    ]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None:
        if kill_after is not None and any(row["step"] >= kill_after for row in _rows(output)):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
        time.sleep(0.005)
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL), process.returncode
    return round(time.perf_counter() - began, 1)


def _rows(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _digests(output: Path, steps: int) -> dict[str, str]:
    parts = {"checkpoint": output / "checkpoints" / f"step_{steps:06d}", "policy": output / "policy"}
    return {name: json.loads((path / "manifest.json").read_text())["digest"] for name, path in parts.items()}


if __name__ == "__main__":
    main()
