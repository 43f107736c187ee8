"""A user's own Python: a function in a file or an installed module, and what decides what it does, found without running it."""

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rl_core.digests import digest_file, digest_files, digest_json
from rl_core.errors import ConfigError

OWN_PACKAGES = ("rl_core", "tasks", "flows")
"""Not followed where they lie beside a user's file: their code is no part of a run's identity."""


def load_function(path: str, name: str, field: str) -> Callable[..., Any]:
    """The function `name` of a Python file, which may import what lies beside it.

    Args:
        field: the section that names the file (`reward`, `algorithm.policy_loss`), for messages.

    Raises:
        ConfigError: no such file or function, or the file raises.
    """
    file = _file(path, field)
    spec = importlib.util.spec_from_file_location(f"ppoflow_{digest_json(str(file.resolve()))}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{_key(field)} = {path} is no Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, typing and pickle look a class's module up there
    # While it is imported, its own directory comes first, as for a script; later imports inside functions find it last, so that
    # a file there cannot take the place of a library.
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{_key(field)} = {path} cannot be imported: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)
    return _function(module, name, path, field)


def load_from_module(module: str, name: str, field: str) -> Callable[..., Any]:
    """The function `name` of a module that Python finds by its dotted name, also in the working directory.

    Raises:
        ConfigError: no such module or function, or the module raises.
    """
    _module_file(module, field)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # as `python -m` does
        sys.path.append(str(Path.cwd()))
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{field}.module = {module} cannot be imported: {type(error).__name__}: {error}.") from error
    return _function(loaded, name, module, field)


def code_fingerprint(path: str, field: str = "") -> dict[str, Any]:
    """Digests of a file and of what that imports from its own directory, as JSON.

    Raises:
        ConfigError: no such file, or one that is no Python.
    """
    file = _file(path, field)
    return _digests(file, file.resolve().parent, None, _key(field))


def module_fingerprint(module: str, field: str) -> dict[str, Any]:
    """Digests of a module and of what that imports: of an installed one from its own package, else from beside it too.

    Raises:
        ConfigError: no such module, or one that is no Python.
    """
    file, root = _module_file(module, field)
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")}
    return _digests(file, root, root / module.split(".")[0] if root in installed else None, f"{field}.module")


def _key(field: str) -> str:
    return f"{field}.path" if field else "path"


def _file(path: str, field: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{_key(field)} = {path}: there is no such file (looked from {Path.cwd()}).")
    return file


def _module_file(module: str, field: str) -> tuple[Path, Path]:
    """The file of a module and the directory where its name begins. Nothing is run: only the first name is asked of Python."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, [str(Path.cwd())])
    stems: list[Path] = []
    if spec is not None and (spec.submodule_search_locations or rest):
        stems = [Path(place, *rest) for place in spec.submodule_search_locations or []]
    elif spec is not None and spec.origin:
        stems = [Path(spec.origin).with_suffix("")]
    for stem in stems:
        for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if file.is_file():
                return file.resolve(), file.resolve().parents[len(rest) + (file.name == "__init__.py")]
    raise ConfigError(
        f"{field}.module = {module}: Python finds no such module with a source file (looked in its path and in {Path.cwd()}). "
        f"Install it into {sys.prefix}, or give its file as {field}.path."
    )


def _function(module: Any, name: str, where: str, field: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'no function'}"
        raise ConfigError(f"{field}.name = {name}: {where} has no such function ({hint}).")
    return function


def _digests(file: Path, root: Path, within: Path | None, key: str) -> dict[str, Any]:
    imports = digest_files(local_imports(file, root, within, key))
    return {
        "sha256": digest_file(file),
        "imports": {str(path.relative_to(root)): digest for path, digest in imports.items()},
    }


def local_imports(path: Path, root: Path, within: Path | None, key: str) -> list[Path]:
    """The files under `root` that a file imports, directly or through each other, by name. Absolute paths.

    Args:
        root: where the names of modules begin.
        within: only files under this directory count; None: all under `root`.
        key: of the configuration, for messages.

    Raises:
        ConfigError: one of them is no Python.
    """
    path, within = path.resolve(), within or root
    packages = [root / folder / "__init__.py" for folder in path.relative_to(root).parents if folder.name]
    pending = [path, *(file for file in packages if file.is_file())]
    found = set(pending)
    while pending:
        for candidate in _candidates(pending.pop(), root, key):
            if candidate not in found and candidate.is_relative_to(within) and candidate.is_file():
                found.add(candidate)
                pending.append(candidate)
    return sorted(found - {path})


def _candidates(file: Path, root: Path, key: str) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {file} cannot be imported: {type(error).__name__}: {error}.") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name)
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[node.level - 1] if node.level else root
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
