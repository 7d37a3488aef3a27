"""Import paths: how a user's class or function is named in a setting."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


class PluginError(ValueError):
    """A path that names nothing; the message says which setting, and how to mend it."""


def split_path(path: str) -> tuple[str, str]:
    """`package.module:Name` or `file.py:Name` as (module or file, name).

    Raises:
        PluginError: there is no colon, or nothing on one side of it.
    """
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise PluginError(f"{path!r} is not an import path; write package.module:Name or path/to/file.py:Name")
    return module, name


def load_plugin(path: str) -> Any:
    """The object that `path` names, importing its module.

    Raises:
        PluginError: the module or file does not exist, or has no such name.
    """
    module_name, name = split_path(path)
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name, path)
    try:
        return vars(module)[name]
    except KeyError:
        public = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise PluginError(f"{path!r}: {module_name} has no {name!r}; it has: {public}") from None


def _import(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{path!r}: no module {error.name!r}; is it installed, or its folder on PYTHONPATH?"
        ) from error


def _load_file(file: Path) -> ModuleType:
    resolved = file.expanduser().resolve()
    if not resolved.is_file():
        raise PluginError(f"no file {resolved}; give the path relative to the current folder, or absolute")
    module_name = f"asyncrl_plugin_{resolved.stem}_{abs(hash(resolved)):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    assert spec is not None, resolved
    assert spec.loader is not None, resolved
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def problems(setting: str, path: str) -> Iterator[str]:
    """What is wrong with `path` in `setting`, found without running its module (it may import torch)."""
    try:
        module, name = split_path(path)
    except PluginError as error:
        yield f"{setting}: {error}"
        return
    source = Path(module).expanduser() if module.endswith(".py") else _module_source(module)
    if source is None or not source.is_file():
        yield f"{setting}={path!r}: no module or file {module!r}; is it installed, or its folder on PYTHONPATH?"
    elif source.suffix == ".py" and name not in (defined := _top_level_names(source)):
        yield f"{setting}={path!r}: {source} defines no {name!r}; it has: {', '.join(sorted(defined))}"


def _module_source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _top_level_names(source: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return found
