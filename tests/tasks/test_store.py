import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_core.artifacts import MANIFEST
from rl_core.errors import BrokenArtifact, StoreError
from tasks import store
from tasks.store import ROOT, Key, Reference, Stage, differences, find, produce

KEY = Key("letters", "a" * 64, {"stage": "letters", "config.x": 1})

MAKER = """
import logging, sys, time
from pathlib import Path
from tasks.store import Key, produce
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
def make(scratch):
    (scratch / "letter").write_text("half")
    print("making", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    (scratch / "letter").write_text("whole")
    return {"n": 1}
print(produce(Key("letters", "a" * 64, {}), make).state, flush=True)
"""


def write(text: str = "abc"):
    def make(scratch: Path) -> dict[str, Any]:
        (scratch / "deep").mkdir(exist_ok=True)
        (scratch / "deep" / "letters.txt").write_text(text)
        return {"length": len(text)}

    return make


def never(scratch: Path) -> dict[str, Any]:
    raise AssertionError("made again")


def maker(home: Path, go: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-u", "-c", MAKER, str(go)],
        cwd=ROOT, env=os.environ | {"PPOFLOW_HOME": str(home)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_made_once_then_reused(home):
    made = produce(KEY, write())
    again = produce(KEY, never)
    assert (made.state, again.state) == ("computed", "reused")
    assert made.digest == again.digest
    assert again.open().results == {"length": 3}
    assert again.open().manifest["components"] == KEY.components
    assert (made.path / "deep" / "letters.txt").read_text() == "abc"


def test_two_processes_make_it_once(home, tmp_path):
    first = maker(home, tmp_path / "go")
    assert line(first) == "making"
    second = maker(home, tmp_path / "go")
    assert line(second) == f"letters: waiting for process {first.pid} on {os.uname().nodename}, which makes the same"
    (tmp_path / "go").touch()
    assert (line(first), line(second)) == ("computed", "reused")
    assert (first.wait(), second.wait()) == (0, 0)
    assert (KEY.path / "letter").read_text() == "whole"


def test_killed_maker_leaves_nothing_taken_for_whole_and_no_lock(home, tmp_path):
    process = maker(home, tmp_path / "never")
    assert line(process) == "making"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert find(KEY) is None

    def make(scratch: Path) -> dict[str, Any]:
        assert list(scratch.iterdir()) == []
        return write()(scratch)

    assert produce(KEY, make).state == "computed"


def test_kept_scratch_goes_on(home):
    def interrupted(scratch: Path) -> dict[str, Any]:
        (scratch / "shard-0").write_text("done")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(KEY, interrupted, keep_scratch=True)

    def go_on(scratch: Path) -> dict[str, Any]:
        assert (scratch / "shard-0").read_text() == "done"
        return {}

    assert produce(KEY, go_on, keep_scratch=True).state == "computed"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / "deep" / "letters.txt"),
        lambda path: (path / "deep" / "letters.txt").unlink(),
        lambda path: (path / "deep" / "more.txt").touch(),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / MANIFEST).write_text("{"),
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"length": 3', '"length": 4')),
    ],
    ids=["flipped byte", "missing file", "superfluous file", "no manifest", "cut manifest", "changed manifest"],
)
def test_broken_artifact_is_set_aside_and_made_again(home, caplog, damage):
    made = produce(KEY, write())
    damage(made.path)
    with pytest.raises(BrokenArtifact):
        made.open()
    assert produce(KEY, write()).state == "computed"
    assert "is set aside as" in caplog.text
    assert made.open().results == {"length": 3}
    assert [path.name for path in made.path.parent.glob(".*.broken-*")] == [f".{KEY.value}.broken-0"]


def test_fresh_replaces_but_a_failure_keeps_the_old(home):
    old = produce(KEY, write("old"))
    with pytest.raises(ZeroDivisionError):
        produce(KEY, lambda scratch: {"n": 1 // 0}, fresh=True)
    assert old.open().results == {"length": 3}
    new = produce(KEY, write("newer"), fresh=True)
    assert (new.state, new.open().results) == ("computed", {"length": 5})
    assert sorted(path.name for path in KEY.path.parent.iterdir()) == sorted([KEY.value, f".{KEY.value}.lock"])
    with pytest.raises(BrokenArtifact, match="expected"):
        old.open()


def test_store_can_be_moved(home, tmp_path, monkeypatch):
    made = produce(KEY, write())
    home.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "elsewhere"))
    assert made.open().results == {"length": 3}
    assert produce(KEY, never).state == "reused"


def test_unwritable_store(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PPOFLOW_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StoreError, match="Set PPOFLOW_HOME"):
        produce(KEY, never)


def test_key_depends_on_code_config_inputs_and_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ROOT", tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    stage = Stage("letters", 1, ("package",), ("pytest", "no-such-distribution"))

    def value(config: Any = 1, inputs: Any = "d") -> str:
        return stage.key({"section": {"x": config, "y": 2}}, {"data": inputs}).value

    first = value()
    assert value() == first
    assert stage.key({"section": {"y": 2, "x": 1}}, {"data": "d"}).value == first
    assert stage.key({}, {}).components["library.no-such-distribution"] is None
    others = [value(config=2), value(inputs="e"), Stage("letters", 2, ("package",), stage.libraries).key({}, {}).value]
    (package / "helper.py").write_text("")
    others.append(value())
    (package / "helper.py").write_text("y = 1\n")
    others.append(value())
    assert len({first, *others}) == 6


def test_sources_of_the_stages_exist():
    from tasks import convert_checkpoint, evaluate_policy, tokenize_dataset, train_policy

    for module in (tokenize_dataset, convert_checkpoint, train_policy, evaluate_policy):
        assert len(module.STAGE.code_digest()) == 64


def test_differences_from_the_nearest(home):
    def key(**components: int) -> Key:
        return Key("letters", format(sum(components.values()), "064x"), components)

    assert differences(key(a=1)) == []
    produce(key(a=1, b=2, c=3), write())
    produce(key(a=9, b=8, c=7), write())
    assert differences(key(a=1, b=2, c=4)) == ["c"]
    assert differences(key(a=9, b=8, d=7)) == ["c", "d"]
    damaged = produce(key(a=100), write()).path / MANIFEST
    damaged.write_text("[]")
    assert differences(key(a=1, b=2, c=4)) == ["c"]


def test_reference_is_json(home):
    reference = produce(KEY, write())
    assert Reference(**json.loads(json.dumps(reference.to_json()))) == reference
