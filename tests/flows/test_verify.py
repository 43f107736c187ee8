"""`ppoflow verify` and `ppoflow store` on a pipeline that ran, as a user calls them; and a run that meets damage."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from rl_core.errors import EXIT_DONE, EXIT_USER
from tests.flows.conftest import Finished
from tests.pipeline import environment, ppoflow


@pytest.fixture
def whole(finished: Finished) -> Iterator[Finished]:
    """Pointed to in this process."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment(finished.home))
    yield finished
    os.environ.clear()
    os.environ.update(before)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_DONE) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert (end.value.code or 0) == code, capsys.readouterr()
    return capsys.readouterr().out


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def artifact(finished: Finished, stage: str) -> Path:
    return next(Path(row["artifact"]) for row in finished.report["stages"] if row["name"] == stage)


def test_the_registered_files_are_those_that_training_wrote(whole: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "verify", "models:/tiny@candidate")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["whole"] * 7
    assert lines[-1] == ("7 directories are whole; models:/tiny@candidate: the registered files are those that training wrote")
    document = json.loads(said(capsys, "verify", "models:/tiny/1", "--json"))
    assert document["whole"] is True
    assert document["checked"][0]["digest"] == document["checked"][3]["digest"]


def test_a_flipped_byte_is_named_with_its_file(whole: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    weights = artifact(whole, "train_policy") / "model.safetensors"
    flip(weights)  # which MLflow's file is another name of
    try:
        text = said(capsys, "verify", "models:/tiny@candidate", code=EXIT_USER)
        document = json.loads(said(capsys, "verify", "--json", code=EXIT_USER))
    finally:
        flip(weights)
    sentence = "the content of model.safetensors was changed (its sha256 differs)"
    damaged = [line.split()[1] for line in text.splitlines() if line.startswith("DAMAGED")]
    assert damaged[:2] == ["models:/tiny/1", "train_policy"]
    assert f"           {sentence}" in text.splitlines()
    assert [one["damage"] for one in document["checked"] if one["what"].startswith("train_policy")] == [[sentence]]
    assert said(capsys, "verify").splitlines()[-1].endswith("directories are whole")


def test_everything_of_a_registered_version_is_listed_as_needed_and_kept(
    whole: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = json.loads(said(capsys, "store", "ls", "--json"))["items"]
    stages = [row["stage"] for row in rows]
    assert sorted(set(stages)) == [
        "convert_checkpoint", "evaluate_model", "evaluate_policy", "run", "tokenize_dataset", "train_policy"
    ]  # fmt: skip
    assert all(row["needed_by"][0].startswith("tiny/1@candidate") for row in rows), rows
    text = said(capsys, "store", "ls")
    assert text.splitlines()[0].split() == ["stage", "key", "state", "size", "last", "used", "needed", "by"]
    gone = json.loads(said(capsys, "store", "gc", "--older-than", "0s", "--dry-run", "--json"))
    assert (gone["deleted"], gone["dry_run"]) == ([], True)
    assert said(capsys, "store", "gc", "--older-than", "0s") == "0 deleted, 0 B freed\n"
    said(capsys, "store", "gc", "--older-than", "soon", code=EXIT_USER)


def test_a_run_sets_aside_what_is_damaged_and_makes_it_again(copied: Finished, finished: Finished, tmp_path: Path) -> None:
    """A flipped byte in an artifact that keeps its time of modification: nobody hashed the rest again, but it is noticed."""
    home = copied.home
    stages = ("tokenize_dataset", "convert_checkpoint", "evaluate_policy")
    directories = [home / artifact(finished, stage).relative_to(finished.home) for stage in stages]
    for directory in directories:
        file = max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        stat = file.stat()
        flip(file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    result = ppoflow("run", finished.config, "--json", tmp_path / "report.json", home=home)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    again = {row["name"]: row["state"] for row in report["stages"]}
    assert again == dict.fromkeys(stages, "computed") | {"train_policy": "reused", "register_policy": again["register_policy"]}
    assert result.stderr.count("The artifact is set aside as") == 3
    assert report["registered"]["version"] == "1", "what was made again is the same"
    assert ppoflow("verify", home=home).returncode == 0
