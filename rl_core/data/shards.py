"""Arrow shards of tokenized prompts, written block by block so that a killed writer loses one block at most.

A block is `shard_rows` consecutive rows of the source; its prompts go to `train/shard-N.arrow` and `eval/shard-N.arrow`
(Arrow IPC stream: opens memory-mapped with `pyarrow.ipc` and `datasets.Dataset.from_file`). Behind them a note
`blocks/N.json` is written with the digests of both: a shard without its note, or that is not what the note says, is written
again. The notes go when all blocks are done.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl_core.digests import digest_files

SPLITS = ("train", "eval")
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("question", pa.string()),
        ("ground_truth", pa.string()),
        ("data_source", pa.string()),
        ("extra_info", pa.string()),
    ]
)
_BATCH = 1000


class Blocks:
    """The blocks of one tokenization under `directory`; those that an earlier try finished are kept.

    Args:
        plan: digest of all that decides the shards; what was written for another plan is removed.
    """

    def __init__(self, directory: Path, plan: str) -> None:
        self.directory, self.plan = directory, plan
        self._notes = directory / "blocks"
        self._finished: dict[int, dict[str, Any]] = {}
        for path in sorted(self._notes.glob("*.json")):
            note = _read(path)
            if note.get("plan") == plan and self._as_noted(note):
                self._finished[int(path.stem)] = note
        kept = {self._note(number) for number in self._finished}
        kept |= {directory / name for note in self._finished.values() for name in note["shards"]}
        for folder in (*SPLITS, "blocks"):
            (directory / folder).mkdir(parents=True, exist_ok=True)
            for path in (directory / folder).iterdir():
                if path not in kept:
                    path.unlink()

    def finished(self, number: int) -> dict[str, Any] | None:
        """The note of a block that is done: `shards` (name → rows, sha256) and `stats` as given to `write`."""
        return self._finished.get(number)

    def write(self, number: int, rows: dict[str, list[dict[str, Any]]], stats: dict[str, Any]) -> dict[str, Any]:
        """Write a block's shards (none for a split without rows), then its note."""
        names = {split: f"{split}/shard-{number:05d}.arrow" for split in SPLITS if rows[split]}
        for split, name in names.items():
            with _replacing(self.directory / name) as partial, pa.OSFile(str(partial), "wb") as file:
                table = pa.table({name: [row[name] for row in rows[split]] for name in SCHEMA.names}, schema=SCHEMA)
                with pa.ipc.new_stream(file, SCHEMA) as writer:
                    writer.write_table(table, max_chunksize=_BATCH)
        digests = digest_files([self.directory / name for name in names.values()])
        shards = {name: {"rows": len(rows[split]), "sha256": digests[self.directory / name]} for split, name in names.items()}
        note = {"plan": self.plan, "shards": shards, "stats": stats}
        with _replacing(self._note(number)) as partial:
            partial.write_text(json.dumps(note), encoding="utf-8")
        self._finished[number] = note
        return note

    def close(self) -> None:
        """Remove the notes: all blocks are done."""
        shutil.rmtree(self._notes)

    def _note(self, number: int) -> Path:
        return self._notes / f"{number:05d}.json"

    def _as_noted(self, note: dict[str, Any]) -> bool:
        paths = {name: self.directory / name for name in note["shards"]}
        if not all(path.is_file() for path in paths.values()):
            return False
        digests = digest_files(list(paths.values()))
        return all(digests[paths[name]] == shard["sha256"] for name, shard in note["shards"].items())


class _replacing:
    """A temporary sibling to write, renamed to `path` when all went well."""

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.tmp")

    def __enter__(self) -> Path:
        return self.partial

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            os.replace(self.partial, self.path)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # the machine went down before it was on disk
        return {}


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people, whole or not at all."""
    with _replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
