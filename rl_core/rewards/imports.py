"""Which files beside a Python file it imports: found in the text, nothing is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

from rl_core.errors import RewardError

OWN_PACKAGES = ("rl_core", "tasks", "flows")
"""Not followed where they lie beside a reward function: their code is no part of a run's identity."""


def local_imports(path: Path) -> list[Path]:
    """The files under `path`'s directory that it imports, directly or through each other, by name. Absolute paths.

    Raises:
        RewardError: one of them is no Python.
    """
    path = path.resolve()
    pending, found = [path], {path}
    while pending:
        file = pending.pop()
        for candidate in _candidates(file, path.parent):
            if candidate not in found and candidate.is_relative_to(path.parent) and candidate.is_file():
                found.add(candidate)
                pending.append(candidate)
    return sorted(found - {path})


def _candidates(file: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"reward.path: {file} cannot be imported: {type(error).__name__}: {error}.") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[node.level - 1] if node.level else folder
            for alias in node.names:  # a name in a module, or a module in a package
                yield from _files(start, f"{node.module}.{alias.name}" if node.module else alias.name)


def _files(start: Path, dotted: str) -> Iterator[Path]:
    """What may be run for the import of `dotted`, packages on the way included."""
    parts = dotted.split(".")
    if parts[0] in OWN_PACKAGES:
        return
    for end in range(1, len(parts) + 1):
        stem = start.joinpath(*parts[:end])
        yield stem / "__init__.py"
        yield stem.with_name(f"{stem.name}.py")
