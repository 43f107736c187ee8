"""Committed directories: what is whole is taken, what is not is refused, whatever was done to it."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rl_core.artifacts import MANIFEST, commit, damage, fresh_scratch, open_artifact, refusal, remedy, scratch_of, set_aside
from rl_core.digests import canonical, digest_file, digest_json
from rl_core.errors import BrokenArtifact, StoreError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))


def make(path: Path, content: bytes = b"0123456789") -> Path:
    scratch = fresh_scratch(path)
    (scratch / "sub").mkdir()
    (scratch / "a.bin").write_bytes(content)
    (scratch / "sub" / "b.txt").write_text("text")
    commit(scratch, path, kind="thing", key="k", components={"c": 1}, results={"rows": 2})
    return path


def test_a_committed_directory_opens_with_what_was_stored(tmp_path):
    artifact = open_artifact(make(tmp_path / "x"))
    assert (artifact.key, artifact.results, artifact.manifest["components"]) == ("k", {"rows": 2}, {"c": 1})
    assert set(artifact.manifest["files"]) == {"a.bin", "sub/b.txt"}
    assert not scratch_of(tmp_path / "x").exists()


def test_equal_content_has_an_equal_digest(tmp_path):
    first, second, other = (open_artifact(make(tmp_path / n, c)) for n, c in (("x", b"same"), ("y", b"same"), ("z", b"else")))
    assert first.digest == second.digest != other.digest


def test_notes_are_verified_but_do_not_count_in_the_digest(tmp_path):
    digests = set()
    for name, log in (("x", "took 3 s"), ("y", "took 4 s")):
        scratch = fresh_scratch(tmp_path / name)
        (scratch / "weights").write_text("w")
        (scratch / "log").write_text(log)
        digests.add(commit(scratch, tmp_path / name, kind="thing", key="k", notes=["log"]).digest)
    assert len(digests) == 1
    flip(tmp_path / "x" / "log")
    with pytest.raises(BrokenArtifact):
        open_artifact(tmp_path / "x")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        lambda x: flip(x / "a.bin"),
        lambda x: flip(x / MANIFEST),
        lambda x: (x / "a.bin").unlink(),
        lambda x: os.truncate(x / "a.bin", 3),
        lambda x: (x / "extra").write_text("planted"),
        lambda x: (x / MANIFEST).unlink(),
        lambda x: (x / MANIFEST).write_text("[]"),
        lambda x: (x / MANIFEST).write_text(json.dumps({**json.loads((x / MANIFEST).read_text()), "key": "other"})),
    ],
    ids=["flip", "flip-manifest", "missing", "truncated", "extra", "no-manifest", "other-manifest", "changed-key"],
)
def test_damage_is_refused(tmp_path, damage, remembered):
    path = make(tmp_path / "x")
    open_artifact(path)
    damage(path)
    with pytest.raises(BrokenArtifact, match=str(path)):
        open_artifact(path, remembered)


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x29])  # 0x29 makes a tab of a space, so that the JSON stays the same
def test_every_single_flipped_byte_of_the_manifest_is_noticed(tmp_path, flip):
    path = make(tmp_path / "x")
    whole = (path / MANIFEST).read_bytes()
    for position in range(len(whole)):
        broken = bytearray(whole)
        broken[position] ^= flip
        (path / MANIFEST).write_bytes(bytes(broken))
        with pytest.raises(BrokenArtifact):
            open_artifact(path)


def test_damage_names_every_file(tmp_path):
    path = make(tmp_path / "x")
    assert damage(path) == []
    flip(path / "a.bin")
    (path / "sub" / "b.txt").unlink()
    (path / "extra").touch()
    assert damage(path) == [
        "extra is superfluous", "sub/b.txt is missing", "the content of a.bin was changed (its sha256 differs)"
    ]  # fmt: skip
    (path / MANIFEST).write_text("{")
    assert [said.partition(" (")[0] for said in damage(path)] == ["its manifest.json is missing or damaged"]


def test_damage_finds_what_the_memory_does_not_and_the_next_use_knows_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.digests._stamp", lambda path: "untouched")
    path = make(tmp_path / "x")
    flip(path / "a.bin")
    open_artifact(path)
    assert damage(path) == ["the content of a.bin was changed (its sha256 differs)"]
    with pytest.raises(BrokenArtifact, match=r"a\.bin"):
        open_artifact(path)


def test_a_damaged_memory_condemns_nothing(tmp_path):
    path = make(tmp_path / "x")
    with closing(sqlite3.connect(tmp_path / "home" / "digests.sqlite")) as memory, memory:
        assert memory.execute("UPDATE digests SET sha256 = 'nonsense'").rowcount == 2
    assert open_artifact(path).key == "k"


def test_a_fifo_in_place_of_a_file_hangs_nobody(tmp_path):
    scratch = fresh_scratch(tmp_path / "x")
    (scratch / "empty").touch()
    commit(scratch, tmp_path / "x", kind="thing", key="k")
    (tmp_path / "x" / "empty").unlink()
    os.mkfifo(tmp_path / "x" / "empty")
    with pytest.raises(BrokenArtifact, match="empty is no file"):
        open_artifact(tmp_path / "x")


def test_a_change_that_keeps_size_and_time_is_found_without_memory(tmp_path):
    path = make(tmp_path / "x")
    open_artifact(path)
    stat = os.stat(path / "a.bin")
    flip(path / "a.bin")
    os.utime(path / "a.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # ctime cannot be set, so even the memory notices
    for remembered in (True, False):
        with pytest.raises(BrokenArtifact):
            open_artifact(path, remembered)


def test_nothing_is_committed_over_something(tmp_path):
    path = make(tmp_path / "x")
    with pytest.raises(StoreError, match="exists already"):
        make(path)
    assert open_artifact(set_aside(path)).key == "k"
    assert open_artifact(make(path, b"new")).key == "k"


def test_a_writer_that_dies_leaves_nothing_that_counts(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from rl_core import artifacts\n"
        "artifacts.os.rename = lambda *a: os._exit(9)\n"
        "final = Path(sys.argv[1]); s = artifacts.fresh_scratch(final); (s / 'a').write_text('x')\n"
        "artifacts.commit(s, final, kind='thing', key='k')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=False).returncode == 9
    assert not (tmp_path / "x").exists()
    assert (scratch_of(tmp_path / "x") / MANIFEST).exists()
    make(tmp_path / "x")
    assert set(open_artifact(tmp_path / "x").manifest["files"]) == {"a.bin", "sub/b.txt"}


def test_digests_are_remembered_until_a_file_changes(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # sha256("abc"), FIPS 180-2
    assert digest_file(file) == digest_file(file) == known
    file.write_bytes(b"abd")
    assert digest_file(file) != known


def test_canonical_json_does_not_depend_on_order_and_refuses_nan():
    assert canonical({"b": 1, "a": [1.5, None]}) == b'{"a":[1.5,null],"b":1}'
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(float("nan"))


def wrapped(error: Exception) -> Exception:
    """As a library or one of our own errors hides it."""
    try:
        try:
            raise error
        except Exception as inner:
            raise ValueError("the file cannot be read") from inner
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "x"), errno.ENOSPC),
        (wrapped(OSError(errno.EDQUOT, "x")), errno.EDQUOT),
        (OSError(errno.EROFS, "x"), errno.EROFS),
        (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (wrapped(OSError("Not enough disk space. Needed: Unknown size")), errno.ENOSPC),
        (OSError(errno.ENOENT, "x"), None),
        (wrapped(ValueError("28")), None),
    ],
)
def test_a_full_or_read_only_disk_is_recognised_behind_other_errors(error, number):
    found = refusal(error)
    assert (found and found.errno) == number
    if found:
        assert ("store gc" in remedy(found)) == (number != errno.EROFS)
