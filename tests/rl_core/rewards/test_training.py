"""A training whose reward is a function beside a model."""

import shutil
from collections.abc import Iterator

import pytest

from tests.rl_core.config.lab import configured, place, training


@pytest.fixture(autouse=True)
def _directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PPOFLOW_HOME", str(place() / "home"))
    yield
    shutil.rmtree(place())
    place.cache_clear()


def test_a_training_with_a_function_beside_a_model() -> None:
    code = "def early(response_ids): return {'tokens': [-float(i) for i, _ in enumerate(response_ids)], 'one': 1}"
    (place() / "early.py").write_text(code)
    parts = [
        {"weight": 2.0, "reward": {"kind": "function", "path": "HERE/reward.py"}},
        {"weight": 0.5, "reward": {"kind": "model", "name_or_path": "HERE/judge"}},
        {"weight": 0.1, "reward": {"kind": "function", "path": "HERE/early.py", "name": "early", "timeout_s": None}},
    ]
    run = training(configured({"reward": {"kind": "weighted", "parts": parts}, "trainer.max_steps": 1}))
    (metrics,) = run["metrics"]
    means = {name: metrics[f"reward/{name}/mean"] for name in ("compute_score", "model", "early", "early/one")}
    assert means["early/one"] == 1.0
    assert 0 < means["compute_score"] <= 1
    assert means["early"] < 0
    total = 2 * means["compute_score"] + 0.5 * means["model"] + 0.1 * means["early"]
    assert metrics["critic/score/mean"] == pytest.approx(total, abs=1e-5)
