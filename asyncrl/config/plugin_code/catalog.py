"""Find the functions that settings may name, and their parameters, without importing torch.

A name is either registered (`"ppo_clip"`), in asyncrl or in one of the user's modules listed in `algorithm.plugins`, or
the import path of a function (`"my_pkg.my_loss:fn"`, `"my_loss.py:fn"`). Both are looked up in the source; `resolve`
then imports the one module that defines it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.algorithms.registry import KINDS
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin, locate, split_path
from asyncrl.config.plugin_code.signatures import (
    MODEL_FUNCTION,
    RegisteredFunction,
    check_arguments,
    function_entry,
    registers,
    registrations,
)
from asyncrl.config.suggestions import did_you_mean

_HOME = {**dict.fromkeys(KINDS, "asyncrl.algorithms"), MODEL_FUNCTION: "asyncrl.trainer"}
"""The package in which the functions of a kind are registered."""


def known(kind: str, plugins: Sequence[str] = ()) -> dict[str, RegisteredFunction]:
    """Return the registered functions of `kind` by name, including those of the modules, packages or files `plugins`.

    Raises:
        ValueError: an unknown kind, a plug-in module that cannot be found or read, or one name registered twice.
    """
    if kind not in _HOME:
        raise ValueError(f"unknown kind {kind!r}{did_you_mean(kind, _HOME)}; kinds are {', '.join(_HOME)}")
    entries: dict[str, RegisteredFunction] = {}
    for entry in (e for module in (_HOME[kind], *plugins) for e in _registered(module)):
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


def check(
    kind: str, name: str, params: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()
) -> RegisteredFunction:
    """Check that `params` fit the keyword-only parameters of `name`, and return its entry.

    Raises:
        PluginError: no such name, or an import path that leads to no function.
        ValueError: an unknown, missing or ill-typed parameter.
    """
    entry = function_entry(kind, name) if ":" in name else _by_name(kind, name, plugins)
    if entry.params is not None:
        check_arguments(f"{kind} {name!r}", entry.params, params or {}, "params")
    return entry


def resolve(
    kind: str, name: str, params: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return the function `name` with `params` bound. Imports only the module that defines it.

    Raises:
        PluginError, ValueError: as for `check`.
    """
    entry = check(kind, name, params, plugins)
    return functools.partial(load_plugin(f"{entry.module}:{entry.function}"), **dict(params or {}))


def _by_name(kind: str, name: str, plugins: Sequence[str]) -> RegisteredFunction:
    if "." in name:
        split_path(name)  # raises: it shows the form with a colon
    entries = known(kind, plugins)
    if name not in entries:
        raise PluginError(
            f"unknown {kind} {name!r}{did_you_mean(name, entries)}; known: {', '.join(entries)}; "
            "or name a function of your own, package.module:function or path/to/file.py:function"
        )
    return entries[name]


def _registered(module: str) -> tuple[RegisteredFunction, ...]:
    path = locate(module)
    if path is None:
        raise ValueError(f"plug-in module {module!r} was not found; install it or add its folder to PYTHONPATH")
    return _entries(path, module)


@functools.cache
def _entries(path: Path, module: str) -> tuple[RegisteredFunction, ...]:
    """Return the functions that the file or package at `path` registers. The source is read once per process."""
    if path.is_file():
        return tuple(registrations(path, module))
    found: list[RegisteredFunction] = []
    for source in sorted(path.rglob("*.py")):
        if module in _HOME.values() and not registers(source):
            continue  # every file of a user's package is parsed, so a syntax error in any is reported before the start
        parts = source.relative_to(path).with_suffix("").parts
        inside = parts[:-1] if parts[-1] == "__init__" else parts
        found += registrations(source, ".".join((module, *inside)))
    return tuple(found)
