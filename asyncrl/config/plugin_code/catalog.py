"""The functions that settings may name, and parameters of users' code, read from Python source without an import.

A function is either registered (`"ppo_clip"`), in asyncrl or in one of the user's modules listed in
`algorithm.plugins`, or named by its import path (`"my_pkg.my_loss:fn"`, `"my_loss.py:fn"`). A decorator
(`@policy_loss("ppo_clip")`) names the kind and the algorithm. The arguments of the function (or of the constructor) are
the parameters, and annotations and defaults are the rules. `resolve` imports the one module that defines a function.

All other code of the user is imported and checked in a process of its own before the start (`interfaces`). The source
is read where no process of a start could import it: algorithms import torch, which takes longer than all checks
together, and may need packages or GPUs that only the ranks' hosts have; and every process needs an agent's number of
turns (`argument`), but only workers run agents.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.algorithms.registry import KINDS
from asyncrl.config.plugin_code.import_paths import (
    PluginError,
    definition,
    load_plugin,
    locate,
    split_path,
    top_level_functions,
)
from asyncrl.config.setting import did_you_mean

MODEL_FUNCTION = "model_function"
DECORATOR_KIND = {kind: kind for kind in (*KINDS, MODEL_FUNCTION)} | {"filter_": "filter", "kl_estimator": "kl"}
"""Kind by decorator name. `filter_` avoids the builtin `filter`; `kl_estimator` marks functions of the kind `kl`."""
_HOME = {**dict.fromkeys(KINDS, "asyncrl.algorithms"), MODEL_FUNCTION: "asyncrl.trainer"}
"""The package in which the functions of a kind are registered."""


@dataclass(frozen=True)
class Param:
    """A parameter that a setting may give: its annotation as source text and, unless required, its default."""

    name: str
    annotation: str
    required: bool
    default: Any = None

    def accepts(self, value: object) -> bool:
        """Return True if `value` fits the annotation: scalars, `Literal[...]`, `None` and unions of these.

        An int is a valid float, a bool is not a number. An annotation of any other form accepts everything, also one
        whose text is no Python: a user's function must check such values itself.
        """
        return not self.annotation or _fits_text(self.annotation, value)

    def __str__(self) -> str:
        suffix = "" if self.required else f" = {self.default!r}"
        return f"{self.name}: {self.annotation or 'Any'}{suffix}"


Params = dict[str, Param]


@dataclass(frozen=True)
class RegisteredFunction:
    """A registered or user-named function: its place and its parameters (None if the source does not show them)."""

    kind: str
    name: str
    module: str
    function: str
    params: Params | None


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


_DECORATOR = re.compile(rb"^[ \t]*@.*\b(?:%s)\s*\(" % "|".join(DECORATOR_KIND).encode(), re.MULTILINE)


def registers(source: Path) -> bool:
    """True if a decorator of the file `source` looks like a registration. This is faster than parsing: a whole package
    takes a quarter of a second, in every process that uses it.
    """
    return _DECORATOR.search(source.read_bytes()) is not None


def registrations(source: Path, module: str) -> Iterator[RegisteredFunction]:
    """Yield every registered function of the file `source`, which imports as `module`."""
    for function in top_level_functions(source):
        for decorator in function.decorator_list:
            if found := _registration(decorator):
                kind, name = found
                yield RegisteredFunction(kind, name, module, function.name, _configurable(function, kind))


def _registration(decorator: ast.expr) -> tuple[str, str] | None:
    """Return (kind, name) of `@kind("name")` or `@registry.kind("name")`; None for any other decorator."""
    match decorator:
        case ast.Call(
            func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
        ) if called in DECORATOR_KIND:
            return DECORATOR_KIND[called], name
    return None


def function_entry(kind: str, path: str) -> RegisteredFunction:
    """Return the function at the import path `path` as an algorithm of `kind`.

    Raises:
        PluginError: the path names nothing, or no function.
        ValueError: a default is not a literal.
    """
    found = definition(path)
    node = None if found is None else found.node
    if isinstance(node, (ast.ClassDef, ast.AsyncFunctionDef)):
        raise PluginError(f"{path!r} is not a plain function; a {kind} is one, with its parameters after a bare *")
    if isinstance(node, ast.FunctionDef) and kind in KINDS and node.args.vararg is None:
        ordinary = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if len(ordinary) != 1:
            raise PluginError(
                f"{path!r} takes ({', '.join(ordinary)}) by position, and a {kind} is called with 1; write its "
                "parameters after a bare *"
            )
    params = _configurable(node, kind) if isinstance(node, ast.FunctionDef) else None
    return RegisteredFunction(kind, path, *split_path(path), params)


def _configurable(function: ast.FunctionDef, kind: str) -> Params | None:
    """Return the parameters of an algorithm; the reference page shows their defaults."""
    params = _params(function, 2 if kind == MODEL_FUNCTION else 1)  # its context and the batch
    for param in (params or {}).values():
        if param.default is ...:
            raise ValueError(
                f"{function.name}: the default of {param.name!r} is not a literal; "
                "write the value out, defaults are read from the source"
            )
    return params


def argument(path: str, args: Mapping[str, Any], name: str) -> Any:
    """Return the value of the parameter `name` of the class or function at `path`: from `args`, else its default.

    None if the parameter has no default, or if the source does not show it.
    """
    if name in args:
        return args[name]
    try:
        param = (_params_at(path, 0) or {}).get(name)
    except PluginError:  # reported where the path is checked
        return None
    return None if param is None or param.default is ... else param.default


def check_arguments(
    label: str, params: Params, given: Mapping[str, Any], where: str, supplied: Collection[str] = ()
) -> None:
    """Check that `given` fits `params`.

    Args:
        label: name of the function or class in messages.
        where: group of settings with the arguments, `params` or `args`.
        supplied: parameters that asyncrl passes itself.

    Raises:
        ValueError: an unknown, missing or ill-typed parameter.
    """
    for name in supplied:
        if name not in params:
            raise ValueError(f"{label} does not take {name!r}, which asyncrl passes to it; add it to its parameters")
    own = [name for name in params if name not in supplied]
    for key, value in given.items():
        if key not in params:
            takes = ", ".join(own) or "no parameters"
            raise ValueError(f"{label} has no parameter {key!r}{did_you_mean(key, own)}; it takes {takes}")
        if not params[key].accepts(value):
            raise ValueError(
                f"{label}: parameter {key!r} is {value!r} ({type(value).__name__}), "
                f"expected {params[key].annotation}; set {where}.{key} to such a value"
            )
    missing = [name for name in own if params[name].required and name not in given]
    if missing:
        raise ValueError(f"{label} needs {where}.{missing[0]} ({params[missing[0]]}); set it")


_BASES_WITHOUT_METHODS = ("object", "ABC", "Generic", "Protocol")


def _params_at(path: str, positional: int) -> Params | None:
    """Return the parameters of the function or constructor at `path`; None if the source does not show them."""
    found = definition(path)
    if found is None:
        return None
    match found.node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() as function if _is_plain(function):
            return _params(function, positional)
        case ast.ClassDef() as class_ if _is_plain(class_):
            for member in class_.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    return _params(member, 1 + positional)
            named = _named_bases(class_)
            if class_.keywords or len(named) > 1 or not all(base.isidentifier() for base in named):
                return None
            try:
                return _params_at(f"{found.module}:{named[0]}", positional) if named else {}
            except PluginError:
                return None
    return None


def _named_bases(class_: ast.ClassDef) -> list[str]:
    """Return the bases of a class that may have methods, as source text."""
    bases = [ast.unparse(base).partition("[")[0] for base in class_.bases]
    return [base for base in bases if base.rpartition(".")[2] not in _BASES_WITHOUT_METHODS]


_MARKS = ("row_check(", "run_in(", "verdict")
"""Beginnings of decorators that leave a function's parameters as they are."""


def _is_plain(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """True if no decorator of the definition changes its parameters."""
    return all(ast.unparse(decorator).startswith(_MARKS) for decorator in node.decorator_list)


def _params(function: ast.FunctionDef | ast.AsyncFunctionDef, positional: int) -> Params | None:
    """Return the parameters of `function` after its first `positional` ones; None if it takes any name."""
    taken = function.args
    if taken.kwarg is not None:
        return None
    plain = [*taken.posonlyargs, *taken.args]
    defaults = [None] * (len(plain) - len(taken.defaults)) + taken.defaults
    pairs = [*zip(plain, defaults, strict=True)][positional:]
    pairs += zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    return {arg.arg: _param(arg, default) for arg, default in pairs}


def _param(arg: ast.arg, default: ast.expr | None) -> Param:
    annotation = ast.unparse(arg.annotation) if arg.annotation else ""
    if default is None:
        return Param(arg.arg, annotation, required=True)
    try:
        return Param(arg.arg, annotation, required=False, default=ast.literal_eval(default))
    except ValueError:
        return Param(arg.arg, annotation, required=False, default=...)


_SCALARS: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


def _fits_text(annotation: str, value: object) -> bool:
    try:
        expression = ast.parse(annotation, mode="eval")
    except SyntaxError:
        return True
    return _fits(expression.body, value)


def _fits(node: ast.expr, value: object) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(left, value) or _fits(right, value)
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(quoted)):
            return _fits_text(quoted, value)
        case ast.Name(id=name) if name in _SCALARS:
            return isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            elements = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            try:
                allowed = [ast.literal_eval(element) for element in elements]
            except ValueError:  # a member of an enumeration
                return True
            return any(value == each and type(value) is type(each) for each in allowed)
        case _:
            return True
