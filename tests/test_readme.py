"""The README says each thing once, and what it points to is there."""

import re
from collections import Counter
from pathlib import Path

import pytest

from flows.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_each_heading_is_there_once() -> None:
    """Two branches that add the same sections merge without a conflict."""
    headings = Counter(re.findall(r"^#+ .*$", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE), re.MULTILINE))
    assert headings
    assert [heading for heading, count in headings.items() if count > 1] == []


def test_each_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_each_command_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    commands = sorted(set(re.findall(r"(?<=bin/ppoflow )[a-z]+", TEXT)))
    assert len(commands) >= 5
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0, command
        assert command in capsys.readouterr().out
