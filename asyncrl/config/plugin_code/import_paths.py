"""Import paths: names of a user's classes and functions in settings.

`package.module:name` and `path/to/file.py:name` both work in every such setting. `definition` finds the definition in
the source, so that the launcher can check a setting without running the code (which may import torch); `load_plugin`
imports it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

FILE_MODULES = "asyncrl_plugin_"
"""Prefix of the names of modules that were loaded by the path of their file."""
_EVERYTHING = "*"
"""Name that stands for all that `from module import *` defines."""


class PluginError(ValueError):
    """An import path leads to nothing. The message begins with the path and has the fix."""


@dataclass(frozen=True)
class Definition:
    """The statement that defines a name, and its module or file."""

    module: str
    node: ast.stmt


def split_path(path: str) -> tuple[str, str]:
    """Return `package.module:Name` or `file.py:Name` as (module or file, name).

    Raises:
        PluginError: there is no colon, or one side of the colon is empty.
    """
    module, _, name = path.rpartition(":")
    if module and name:
        return module, name
    head, dot, tail = path.rpartition(".")
    example = "package.module:name or path/to/file.py:name"
    if ":" not in path and dot:
        example = f"{path}:name, with the name in that file" if tail == "py" else f"{head}:{tail}"
    raise PluginError(f"{path!r} is not an import path: the name follows a colon; write {example}")


def locate(module: str) -> Path | None:
    """Return the file (for a package, the folder) of `module`, a dotted name or a `.py` file; None if there is none.

    Only the top-level package is looked up. No package on the path is executed.
    """
    if module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        return file if file.is_file() else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.submodule_search_locations is None:
        return Path(spec.origin) if spec is not None and spec.has_location and spec.origin and not rest else None
    for root in spec.submodule_search_locations:
        path = Path(root).joinpath(*rest)
        files = (path.with_name(path.name + suffix) for suffix in importlib.machinery.all_suffixes())
        for found in (path if (path / "__init__.py").is_file() else None, *files, path):
            if found is not None and found.exists():
                return found
    return None


def definition(path: str) -> Definition | None:
    """Return the definition that `path` names, read from the source; None if the source does not show it.

    Raises:
        PluginError: there is no such module or file, it is not Python, or it defines no such name.
    """
    module, name = split_path(path)
    source = locate(module)
    if source is None:
        raise PluginError(f"{path!r}: no module or file {module!r}; is it installed, or its folder on PYTHONPATH?")
    source = source / "__init__.py" if source.is_dir() else source
    if source.suffix != ".py":
        return None
    defined = _names(_parsed(source).body)
    node = defined.get(name)
    if isinstance(node, ast.ImportFrom):
        original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
        try:
            return None if node.level else definition(f"{node.module}:{original}")
        except PluginError:  # a submodule, or a name that is defined when its module runs
            return None
    if node is None and _EVERYTHING not in defined:
        raise PluginError(f"{path!r}: {source} defines no {name!r}; it has: {', '.join(sorted(defined)) or 'nothing'}")
    return None if node is None else Definition(module, node)


def path_problems(group: str, path: str) -> Iterator[str]:
    """Yield an error message if the setting `<group>.path` names nothing, as far as the source shows."""
    try:
        definition(path)
    except PluginError as error:
        yield f"{group}.path={error}"


def top_level_functions(source: Path) -> list[ast.FunctionDef]:
    """Return the functions that the file `source` defines at its top level.

    Raises:
        PluginError: the file cannot be read as Python.
    """
    return [node for node in _parsed(source).body if isinstance(node, ast.FunctionDef)]


def load_plugin(path: str) -> Any:
    """Import the module of `path` and return the object.

    Raises:
        PluginError: the module or file does not exist, fails while it is imported, or has no such name.
    """
    module_name, name = split_path(path)
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except FileNotFoundError as error:
        raise PluginError(f"{path!r}: {error}") from error
    except ModuleNotFoundError as error:
        message = f"{path!r}: no module {error.name!r}; is it installed, or its folder on PYTHONPATH?"
        raise PluginError(message) from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"{path!r}: importing it failed in {last.filename}:{last.lineno}: {type(error).__name__}: {error}"
        ) from error
    try:
        return vars(module)[name]
    except KeyError:
        public = ", ".join(key for key in vars(module) if not key.startswith("_"))
        raise PluginError(f"{path!r}: {module_name} defines no {name!r}; it has: {public}") from None


def _load_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    module_name = f"{FILE_MODULES}{file.stem}_{crc32(str(file).encode()):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; give the path relative to the current folder, or absolute")
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # So that the next import fails like this one, and does not get an incomplete module.
        del sys.modules[module_name]
        raise
    return module


def _parsed(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_bytes(), filename=str(source))
    except (OSError, SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise PluginError(f"'{source}{line}' cannot be read as Python: {error}") from error


def _names(body: Iterable[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the names that `body` defines, also within `if`, `try` and `with`; the last definition of each name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] = node
            case ast.Assign(targets=targets):
                found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in names}
            case ast.If() | ast.Try() | ast.With():
                inner = [part for field in ("body", "orelse", "finalbody") for part in getattr(node, field, ())]
                inner += [part for handler in getattr(node, "handlers", ()) for part in handler.body]
                found |= _names(inner)
    return found
