"""Rows to prompt shards: chat template, length limit, split by content, block by block.

    stats = tokenize(config.data, tokenizer, scratch)

writes `train/`, `eval/` (`rl_core.data.shards`), `tokenizer/` and `stats.json` under `scratch`, for the caller to commit. An
interrupted call goes on with the blocks that it finished, and ends with the same bytes as one that was not interrupted.
"""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_core.config.data import DataConfig
from rl_core.data.rows import Conversation, Unusable, conversation
from rl_core.data.shards import SPLITS, Blocks, write_json
from rl_core.data.sources import RowSource, read_rows, source_fingerprint
from rl_core.data.stats import Stats
from rl_core.digests import digest_files, digest_json
from rl_core.errors import DataError
from rl_core.models.pad import settle_pad

_MACHINE_KEYS = ("is_local", "local_files_only", "name_or_path")
"""What transformers saves of how a tokenizer was loaded: it would make equal tokenizers differ."""
_TOGETHER = 2000
"""Rows that are encoded at a time, on all cores, while the next ones get their chat template."""


def tokenize(config: DataConfig, tokenizer: Any, scratch: Path) -> dict[str, Any]:
    """Tokenize the prompts of `config`.

    Args:
        tokenizer: a transformers tokenizer with its chat template; a pad token is set where it has none.
        scratch: directory to write; what an earlier call with the same inputs finished there is kept.

    Returns:
        What `stats.json` holds: `rows`, `train_rows`, `eval_rows`, `truncated`, `dropped`, `prompt_length`, `pad_token_id`,
        `eos_token_id`, `source`, `shards`.

    Raises:
        DataError: no chat template, a prompt too long with `truncation: error`, too many rows dropped, an empty split; and
            what `read_rows` raises.
        ConfigError: see `read_rows`.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"model.chat_template: the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template, so messages "
            "cannot become a prompt. Set model.chat_template to a Jinja file, or take an instruction-tuned model."
        )
    pad = settle_pad(tokenizer)
    source = read_rows(config)
    fingerprint = source_fingerprint(config)
    saved = _save_tokenizer(tokenizer, scratch / "tokenizer")
    plan = digest_json(
        {"data": config.identity(), "source": fingerprint, "tokenizer": saved, "shard_rows": config.shard_rows},
    )
    (scratch / "stats.json").unlink(missing_ok=True)
    blocks = Blocks(scratch, plan)
    total = Stats()
    shards: dict[str, Any] = {}
    for number, start in enumerate(range(0, len(source), config.shard_rows)):
        note = blocks.finished(number)
        if note is None:
            rows, stats = _tokenize_block(config, tokenizer, source, start)
            note = blocks.write(number, rows, stats.to_json())
        total.add(Stats.from_json(note["stats"]))
        total.check_share(config.max_dropped_share, len(source))
        shards |= note["shards"]
    counts = {split: sum(shard["rows"] for name, shard in shards.items() if name.startswith(split)) for split in SPLITS}
    _check_splits(counts, config)
    summary = {
        **total.summary(),
        "train_rows": counts["train"],
        "eval_rows": counts["eval"],
        **pad,
        "source": fingerprint,
        "shards": shards,
    }
    write_json(scratch / "stats.json", summary)
    blocks.close()
    return summary


def _tokenize_block(
    config: DataConfig, tokenizer: Any, source: RowSource, start: int
) -> tuple[dict[str, list[dict[str, Any]]], Stats]:
    """The shard rows of both splits for the source's rows from `start` on."""
    stats = Stats()
    chats: list[tuple[int, Conversation, str]] = []
    encoded: list[Future[list[list[int]]]] = []

    def encode() -> None:
        texts = [text for _, _, text in chats[len(encoded) * _TOGETHER : (len(encoded) + 1) * _TOGETHER]]
        encoded.append(encoder.submit(_encode, tokenizer, texts))

    with ThreadPoolExecutor(1) as encoder:
        for index, row in enumerate(source.read(start, min(start + config.shard_rows, len(source))), start):
            stats.rows += 1
            try:
                chat = conversation(row, config, source.name)
                chats.append((index, chat, render(tokenizer, chat)))
            except Unusable as error:
                stats.drop(index, error.reason, str(error), str(row.get(config.prompt_column)))
            if len(chats) == (len(encoded) + 1) * _TOGETHER:
                encode()
        encode()
    ids = [row for part in encoded for row in part.result()]
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for (index, chat, text), input_ids in zip(chats, ids, strict=True):
        try:
            kept = _limit(input_ids, config, index)
        except Unusable as error:
            stats.drop(index, error.reason, str(error), chat.question)
            continue
        stats.keep(len(kept), truncated=len(kept) < len(input_ids))
        rows["eval" if chat.is_eval else "train"].append(
            {
                "prompt_id": chat.prompt_id,
                "input_ids": kept,
                "text": text if len(kept) == len(input_ids) else tokenizer.decode(kept),
                "question": chat.question,
                "ground_truth": chat.ground_truth,
                "data_source": chat.data_source,
                "extra_info": chat.extra_info,
            }
        )
    return rows, stats


def render(tokenizer: Any, chat: Conversation) -> str:
    """The prompt with its chat template.

    Raises:
        Unusable: the template refuses it.
    """
    import jinja2

    try:
        text = tokenizer.apply_chat_template(chat.messages, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise Unusable("template_error", f"the chat template raises {type(error).__name__} ({error})") from None
    if not text:
        raise Unusable("empty_prompt", "the chat template makes an empty text of it")
    return text


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """What the tokenizer makes of rendered texts; on all cores, where its own call only prepares what the library computes."""
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    some = texts[:: max(1, len(texts) // 8)]
    by_call = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]  # also sets that nothing is cut or padded
    if backend is None or [item.ids for item in backend.encode_batch_fast(some, add_special_tokens=False)] != by_call:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]  # code of its own
    return [item.ids for item in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _limit(input_ids: list[int], config: DataConfig, index: int) -> list[int]:
    """Apply `data.truncation`; the length is that of the very ids that the model gets."""
    limit = config.max_prompt_length
    if not input_ids:
        raise Unusable("empty_prompt", "the tokenizer makes no tokens of it")
    if len(input_ids) <= limit:
        return input_ids
    if config.truncation == "left":
        return input_ids[-limit:]
    if config.truncation == "right":
        return input_ids[:limit]
    if config.truncation == "drop":
        raise Unusable("too_long", f"{len(input_ids)} tokens with the chat template, data.max_prompt_length = {limit}")
    raise DataError(
        f"data.max_prompt_length = {limit}: row {index} has {len(input_ids)} tokens with the chat template. Raise the limit, or "
        "set data.truncation to left or right (cut its beginning or end) or to drop (leave it out, as far as "
        "data.max_dropped_share allows)."
    )


def _save_tokenizer(tokenizer: Any, directory: Path) -> dict[str, str]:
    """Save it without traces of the machine; returns the digests of its files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {key: value for key, value in settings.items() if key not in _MACHINE_KEYS})
    return {file.name: digest for file, digest in digest_files(sorted(directory.iterdir())).items()}


def _check_splits(counts: dict[str, int], config: DataConfig) -> None:
    for split, other in (("train", "eval"), ("eval", "train")):
        if not counts[split]:
            remedy = "a smaller" if split == "train" else "a larger"
            raise DataError(
                f"data.eval_fraction = {config.eval_fraction:g}: of {counts[other]} usable prompts none falls on the {split} "
                f"side (a hash of each prompt decides). Take more distinct prompts, or set {remedy} data.eval_fraction."
            )
