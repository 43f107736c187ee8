"""How a rank's program ends, seen from outside: exit code and last line."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from rl_core import entry
from rl_core.entry import NEEDED, check_libraries
from rl_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os
from rl_core import entry, errors

def main(arguments):
    {body}

entry.run_program(main)
"""


def ends(body: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", PROGRAM.format(body=body)], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("print('well')", 0, "well\n"),
        ("raise errors.RewardError('It raises\\n  E: a\\tb\\n\\nc.')", 2, "ppoflow: error: It raises E: a b c.\n"),
        ("raise errors.LaunchError('Rank 1 is missing.')", 2, "ppoflow: error: Rank 1 is missing.\n"),
        ("raise errors.Interrupted('Stopped after\\nstep 3.')", 75, "ppoflow: Stopped after step 3.\n"),
    ],
)  # fmt: skip
def test_an_end_that_is_no_crash_is_one_line(body, code, said):
    ended = ends(body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, said, "")


@pytest.mark.parametrize(
    "body",
    [
        "open('/dev/full', 'w').write('x' * 100000)",
        "raise errors.PpoflowError('rank 0 failed (OSError: [Errno 28] No space left on device)')",
    ],
)
def test_a_full_disk_is_the_users_turn_whatever_was_being_written(body):
    ended = ends(body)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert re.fullmatch(r"ppoflow: error: rank 0 could not write: .*No space left on device.*Make room .*\n", ended.stdout)


@pytest.mark.parametrize("body", ["raise ValueError('x')", "raise errors.BrokenArtifact('x')"])
def test_a_crash_has_its_traceback(body):
    ended = ends(body)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert re.fullmatch(r"ppoflow: rank 0 ended by (ValueError|BrokenArtifact)\.\n", ended.stdout)


def test_an_abort_by_a_library_shows_where_the_program_was():
    """As NCCL's watchdog does it."""
    ended = ends("os.abort()")
    assert ended.returncode == -6
    assert " in main\n" in ended.stderr


def test_the_line_is_one_write_however_many_ranks_speak(tmp_path):
    """strace is not everywhere: a raw stream counts instead of the terminal."""
    body = """
    import io, sys
    class Counting(io.RawIOBase):
        def writable(self):
            return True
        def write(self, block):
            os.write(2, b"<" + bytes(block) + b">")
            return len(block)
    sys.stdout = io.TextIOWrapper(Counting(), write_through=True)
    raise errors.DataError("one two")
    """
    assert ends(body.strip()).stderr == "<ppoflow: error: one two\n>"


@pytest.mark.parametrize(
    "found",
    [
        {"torch": "2.11.0+cu130", "transformers": "5.17.0"},
        {"torch": "2.13.0a0+gitdeadbeef", "transformers": "5.24.0.dev0"},
        {"torch": "3.0", "transformers": "10.0.0"},
    ],
)
def test_libraries_that_are_new_enough(found):
    check_libraries(found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"torch": "2.9.1+cpu", "transformers": "5.24.0"}, "^torch 2.9.1+cpu is installed in"),
        ({"torch": "2.13.0", "transformers": "4.57.1"}, "^transformers 4.57.1 is installed in"),
        ({"torch": "2.3.1", "transformers": None}, "^torch 2.3.1 is installed and transformers is not installed in"),
    ],
)
def test_libraries_that_are_too_old(found, said):
    with pytest.raises(ConfigError, match=said.replace("+", r"\+") + ".*but ppoflow needs torch >= 2.11, transformers >= 5.17"):
        check_libraries(found)


def test_pip_is_told_the_same():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{name}>={major}.{minor}" for name, (major, minor) in NEEDED.items()} <= set(dependencies)


@pytest.mark.parametrize("module", ["rl_core.train", "rl_core.evaluate"])
def test_an_old_library_is_named_before_it_is_imported(tmp_path, module):
    """The first version that the path has is the installed one for pip and Python."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('imported')")
    (tmp_path / "torch-2.3.1.dist-info").mkdir()
    (tmp_path / "torch-2.3.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.3.1\n")
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = subprocess.run([sys.executable, "-m", module], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.startswith("ppoflow: error: torch 2.3.1 is installed in")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_lack_of_memory_names_what_needs_less(error):
    said = entry._explained(error)
    assert all(knob in said for knob in ("per_device_train_batch_size", "activation_checkpointing", "rollout.batch_size"))
