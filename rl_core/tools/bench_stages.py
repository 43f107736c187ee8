"""The stages before the training, timed against what they are made of. One process:

    python -m rl_core.tools.bench_stages tokenize|convert --config_path X.yaml --work DIR --out FILE.json [--set key=value]…

Tokenization (template, ids, split, Arrow, digests, commit) against the raw `tokenizers` library on prompts that have their
template already, and against what a script does: a call for each row. Conversion (read, write shards, sha256, fsync, commit)
against copying the same files: cp, sync, sha256sum, one after the other.
"""

import argparse
import json
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from rl_core.artifacts import commit, fresh_scratch
from rl_core.checkpoint.convert import convert
from rl_core.config import Config, load_config
from rl_core.data.rows import Unusable, conversation
from rl_core.data.sources import read_rows
from rl_core.data.tokenize import render, tokenize
from rl_core.entry import run_program
from rl_core.errors import ConfigError
from rl_core.models.source import load_tokenizer, resolve
from rl_core.process import die_with_parent
from rl_core.tools.bench_report import OURS, Done, compare


def main(arguments: Sequence[str]) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(prog="rl_core.tools.bench_stages", description="A bench of a stage before the training.")
    parser.add_argument("what", choices=("tokenize", "convert"))
    parser.add_argument("--config_path", type=Path, required=True, help="the configuration (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the configuration")
    parser.add_argument("--work", type=Path, required=True, help="directory on the disk to measure")
    parser.add_argument("--out", type=Path, required=True, help="the result (JSON)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    config = load_config(options.config_path, options.set)
    measure = bench_tokenize if options.what == "tokenize" else bench_convert
    result = {
        "what": options.what, "torch": torch.__version__, "transformers": transformers.__version__,
        **measure(config, options.work.absolute(), options.rounds),
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def bench_tokenize(config: Config, work: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second of the stage, of the raw library and of a call for each row."""
    tokenizer: Any = load_tokenizer(resolve(config.model), config.model.chat_template)
    source = read_rows(config.data)
    chats = []
    for row in source.read(0, len(source)):
        try:
            chat = conversation(row, config.data, source.name)
            chats.append((chat.messages, render(tokenizer, chat)))
        except Unusable:
            continue
    texts = [text for _, text in chats]
    tokens = sum(map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))

    def ours() -> Done:
        final = work / "dataset"
        began = time.perf_counter()
        scratch = fresh_scratch(final)
        tokenize(config.data, tokenizer, scratch)
        commit(scratch, final, kind="dataset", key="bench")
        seconds = time.perf_counter() - began
        shutil.rmtree(final)
        return Done(tokens, seconds)

    def raw() -> Done:
        began = time.perf_counter()
        ids = [item.ids for item in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
        assert ids
        return Done(tokens, time.perf_counter() - began)

    def each() -> Done:
        began = time.perf_counter()
        for messages, _ in chats:
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return Done(tokens, time.perf_counter() - began)

    ways = {OURS: ours, "tokenizers' encode_batch on rendered texts": raw, "apply_chat_template, row by row": each}
    if not hasattr(tokenizer, "backend_tokenizer"):
        del ways["tokenizers' encode_batch on rendered texts"]
    return compare("tokens", ways, rounds, rows=len(source), tokens_per_row=round(tokens / max(1, len(chats)), 1))


def bench_convert(config: Config, work: Path, rounds: int) -> dict[str, Any]:
    """Bytes of the model's files a second, converted and copied; the most memory that the conversion had."""
    source = resolve(config.model)
    tokenizer = load_tokenizer(source, config.model.chat_template)
    total = sum(path.stat().st_size for path in source.weights)
    room = shutil.disk_usage(work).free
    if room < 1.1 * total:
        raise ConfigError(f"PPOFLOW_HOME: {work} has {room / 1e9:.1f} GB free, a copy of the model needs {1.1 * total / 1e9:.1f} GB.")

    def ours() -> Done:
        final = work / "base"
        began = time.perf_counter()
        scratch = fresh_scratch(final)
        convert(source, tokenizer, scratch)
        commit(scratch, final, kind="base", key="bench")
        seconds = time.perf_counter() - began
        shutil.rmtree(final)
        return Done(total, seconds)

    def copied() -> Done:
        target = fresh_scratch(work / "copy")
        began = time.perf_counter()
        files = [str(target / path.name) for path in source.weights]
        subprocess.run(["cp", *map(str, source.weights), str(target)], check=True)
        subprocess.run(["sync", *files], check=True)
        subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        shutil.rmtree(target)
        return Done(total, seconds)

    result = compare("bytes", {OURS: ours, "cp, sync, sha256sum": copied}, rounds, gigabytes=round(total / 1e9, 3))
    return result | {"gib_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)}


if __name__ == "__main__":
    die_with_parent()
    run_program(main)
