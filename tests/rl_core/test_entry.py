"""How a rank's program ends, seen from outside: exit code and last line."""

import subprocess
import sys
from pathlib import Path

import pytest

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
        ("raise errors.Interrupted('Stopped after\\nstep 3.')", 75, "ppoflow: Stopped after step 3.\n"),
    ],
)  # fmt: skip
def test_an_end_that_is_no_crash_is_one_line(body, code, said):
    ended = ends(body)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, said, "")


@pytest.mark.parametrize("body", ["raise ValueError('x')", "raise errors.BrokenArtifact('x')"])
def test_a_crash_has_its_traceback(body):
    ended = ends(body)
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


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
