"""A run whose base model is a registered policy goes on from it."""

import json
from pathlib import Path

from tests.flows.conftest import Finished
from tests.pipeline import ppoflow


def test_a_registered_policy_is_the_next_run_s_base(copied: Finished, tmp_path: Path) -> None:
    result = ppoflow(
        "run", copied.config, "--json", tmp_path / "next.json",
        "--set", "model.name_or_path=models:/tiny@candidate", "--set", "registry.name=tiny-next", home=copied.home,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "next.json").read_text(encoding="utf-8"))
    before = copied.report["evaluation"]["policy"]
    after = report["evaluation"]["base"]
    for metric in ("reward", "accuracy", "response_length"):
        assert after[metric] == before[metric]
    assert after["kl"]["mean"] == 0.0
    assert report["registered"]["name"] == "tiny-next"
