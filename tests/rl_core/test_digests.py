"""Digests of files: remembered while untouched, and right also where they cannot be remembered."""

import hashlib
import logging
import os
import sqlite3
from pathlib import Path

import pytest

from rl_core.digests import digest_file, digest_files, moved

HOURS = hashlib.sha256(b"hours").hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_what_is_untouched_is_remembered_and_a_change_is_noticed(tmp_path: Path, home: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"hours")
    other.write_bytes(b"other")
    assert digest_files([file, other])[file] == HOURS
    with sqlite3.connect(home / "digests.sqlite") as memory:
        memory.execute("UPDATE digests SET sha256 = 'remembered' WHERE path = ?", (str(file.resolve()),))
    assert digest_file(file) == "remembered"
    assert digest_file(file, remembered=False) == HOURS
    file.write_bytes(b"house")
    assert digest_file(file) == hashlib.sha256(b"house").hexdigest()


def no_database(home: Path) -> None:
    (home / "digests.sqlite").mkdir(parents=True)


def no_sqlite(home: Path) -> None:
    home.mkdir()
    (home / "digests.sqlite").write_bytes(b"something else" * 100)


def read_only(home: Path) -> None:
    """A memory that lets itself be read but refuses every insertion, as on a full disk."""
    home.mkdir()
    with sqlite3.connect(home / "digests.sqlite") as memory:
        memory.execute("CREATE TABLE digests (path TEXT PRIMARY KEY, stamp TEXT, sha256 TEXT)")
        memory.execute("CREATE TRIGGER full BEFORE INSERT ON digests BEGIN SELECT RAISE(ABORT, 'disk is full'); END")


def no_home(home: Path) -> None:
    home.write_text("a file")


@pytest.mark.parametrize("spoil", [no_database, no_sqlite, read_only, no_home])
def test_without_a_memory_files_are_hashed_each_time(tmp_path, home, spoil, caplog):
    spoil(home)
    file = tmp_path / "a"
    file.write_bytes(b"hours")
    with caplog.at_level(logging.WARNING):
        assert [digest_file(file) for _ in range(3)] == [HOURS] * 3
    [said] = [record.getMessage() for record in caplog.records]
    assert "digests.sqlite" in said


def test_a_missing_file_is_an_error_as_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "none")


def test_a_change_within_one_tick_of_the_clock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 6.13 stamp files with a clock that stands still for up to 10 ms."""
    tick = 10_000_000

    def coarse(path: Path) -> str:
        stat = path.stat()
        return f"{stat.st_size}:{stat.st_mtime_ns // tick}:{stat.st_ctime_ns // tick}:{stat.st_ino}"

    monkeypatch.setattr("rl_core.digests._stamp", coarse)
    file = tmp_path / "a"
    for content in (b"hours", b"house") * 20:
        file.write_bytes(content)
        assert digest_file(file) == hashlib.sha256(content).hexdigest()


def test_a_flip_that_sets_the_time_of_modification_back_is_noticed_and_nothing_else_is_read(tmp_path: Path, home: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(b"hours")
    digest_files(files)
    with sqlite3.connect(home / "digests.sqlite") as memory:
        memory.execute("UPDATE digests SET sha256 = 'remembered'")
    stat = files[1].stat()
    files[1].write_bytes(b"house")
    os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files[1].stat().st_mtime_ns == stat.st_mtime_ns
    found = digest_files(files)
    assert [found[file] for file in files] == ["remembered", hashlib.sha256(b"house").hexdigest(), "remembered"]


def test_what_is_renamed_is_still_remembered_and_nothing_else_is(tmp_path: Path, home: Path) -> None:
    files = [tmp_path / folder / "f" for folder in ("a_b", "a_b/deep", "a_b0", "a%b", "aXb")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"hours")
    digest_files(files)
    (tmp_path / "a_b").rename(tmp_path / "new")
    moved(tmp_path / "a_b", tmp_path / "new")
    with sqlite3.connect(home / "digests.sqlite") as memory:
        paths = {str(Path(path).relative_to(tmp_path.resolve())) for (path,) in memory.execute("SELECT path FROM digests")}
        memory.execute("UPDATE digests SET sha256 = 'remembered'")
    assert paths == {"new/f", "new/deep/f", "a_b0/f", "a%b/f", "aXb/f"}
    assert digest_file(tmp_path / "new/deep/f") == "remembered"
