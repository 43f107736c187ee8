"""The direction of imports – flows → tasks → rl_core, never back – and what may be imported only where it is used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {"rl_core": {"tasks", "flows", "prefect", "mlflow"}, "tasks": {"flows"}, "flows": set()}
"""Nowhere in a package, not even inside functions."""
HEAVY = {"torch", "transformers", "datasets", "mlflow", "matplotlib"}
"""In flows and tasks inside functions only, so that importing them costs little."""
FILES = sorted(path for package in FORBIDDEN for path in (ROOT / package).rglob("*.py"))


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Top-level names of the imported modules."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(ast.walk(tree)) & FORBIDDEN[package]
    if package != "rl_core":
        assert not imported(iter(tree.body)) & HEAVY
