"""Which algorithms exist and whether a configured choice is a valid one, answered without importing torch.

A name is either registered (`"ppo_clip"`) in this package or in one of the user's plug-in modules, or the import path
of a function (`"my_pkg.my_loss:fn"` or `"my_pkg.my_loss.fn"`). Both are looked up in the source by `signatures`; a
user's module is located through the top-level package's import spec, so nothing of it runs either.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.algorithms.signatures import KINDS, Entry, function_entry, registrations

_PACKAGE = "asyncrl.algorithms"


class UnknownAlgorithmError(ValueError):
    """No algorithm of that kind has that name; the message lists the known ones and the nearest."""


def known(kind: str, plugins: Sequence[str] = ()) -> dict[str, Entry]:
    """Registered algorithms of `kind` by name, those of the modules or packages `plugins` included.

    Raises:
        ValueError: an unknown kind, a plug-in module that cannot be found, or one name registered twice.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}{_nearest(kind, KINDS)}; kinds are {', '.join(KINDS)}")
    entries: dict[str, Entry] = {}
    for entry in (e for module in (_PACKAGE, *plugins) for e in _of_module(module)):
        if entry.kind != kind:
            continue
        if entry.name in entries:
            first = entries[entry.name]
            raise ValueError(
                f"{kind} {entry.name!r} is registered twice, by {first.module}:{first.function} and "
                f"{entry.module}:{entry.function}; rename one of them"
            )
        entries[entry.name] = entry
    return dict(sorted(entries.items()))


def check(kind: str, name: str, params: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()) -> Entry:
    """The entry of `name`, after checking that `params` fit its keyword-only parameters.

    Raises:
        UnknownAlgorithmError: no such name, or an import path that leads to no function.
        ValueError: an unknown, missing or ill-typed parameter.
    """
    entry = _by_import_path(kind, name) if ":" in name or "." in name else _by_name(kind, name, plugins)
    given = dict(params or {})
    for key, value in given.items():
        if key not in entry.params:
            takes = ", ".join(entry.params) or "no parameters"
            raise ValueError(f"{kind} {name!r} has no parameter {key!r}{_nearest(key, entry.params)}; it takes {takes}")
        if not entry.params[key].accepts(value):
            raise ValueError(
                f"{kind} {name!r}: parameter {key!r} is {value!r} ({type(value).__name__}), "
                f"expected {entry.params[key].annotation}; set params.{key} to such a value"
            )
    missing = [p.name for p in entry.params.values() if p.required and p.name not in given]
    if missing:
        raise ValueError(f"{kind} {name!r} needs params.{missing[0]} ({entry.params[missing[0]]}); set it")
    return entry


def _by_name(kind: str, name: str, plugins: Sequence[str]) -> Entry:
    entries = known(kind, plugins)
    if name not in entries:
        raise UnknownAlgorithmError(
            f"unknown {kind} {name!r}{_nearest(name, entries)}; known: {', '.join(entries)}; "
            "or give a function of your own as 'package.module:function'"
        )
    return entries[name]


def _by_import_path(kind: str, name: str) -> Entry:
    module, _, function = name.rpartition(":" if ":" in name else ".")
    if not module or not function:
        raise UnknownAlgorithmError(f"{kind} {name!r} is not an import path; write it as 'package.module:function'")
    path = _locate(module)
    if path is None:
        raise UnknownAlgorithmError(
            f"{kind} {name!r}: module {module!r} was not found; install its package or add its folder to PYTHONPATH"
        )
    entry = function_entry(_source(path), module, function, kind)
    if entry is None:
        raise UnknownAlgorithmError(
            f"{kind} {name!r}: {_source(path)} defines no top-level function {function!r}; "
            "name the module that defines it (not one that re-exports it)"
        )
    return entry


def _nearest(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _source(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path


def _locate(module: str) -> Path | None:
    """The `.py` file or package folder of `module`; only finds, never imports, so parent packages do not run."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin and not rest else None
    for root in spec.submodule_search_locations:
        path = Path(root).joinpath(*rest)
        if path.is_dir():
            return path
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return None


def _of_module(module: str) -> tuple[Entry, ...]:
    path = _locate(module)
    if path is None:
        raise ValueError(f"plug-in module {module!r} was not found; install it or add its folder to PYTHONPATH")
    return _entries(path, module)


@functools.cache
def _entries(path: Path, module: str) -> tuple[Entry, ...]:
    """What is registered in the file or package at `path`: read once, however many choices are looked up in it."""
    if path.is_file():
        return tuple(registrations(path, module))
    found: list[Entry] = []
    for source in sorted(path.rglob("*.py")):
        parts = source.relative_to(path).with_suffix("").parts
        inside = parts[:-1] if parts[-1] == "__init__" else parts
        found += registrations(source, ".".join((module, *inside)))
    return tuple(found)
