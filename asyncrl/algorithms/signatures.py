"""Reads registrations and parameters out of Python source without importing it.

The launcher validates `algorithm.*.name` and `.params` but must not import torch, which every loss module does. The
source says all that is needed: the decorator (`@policy_loss("ppo_clip")`) names the kind and the algorithm, the
keyword-only arguments of the decorated function are its parameters, their annotations and defaults the rules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("policy_loss", "correction", "advantage", "kl", "value_loss", "aggregation", "filter", "shaping")
DECORATOR_KIND = {kind: kind for kind in KINDS} | {"filter_": "filter", "kl_estimator": "kl"}
"""Decorator name to kind; `filter_` because `filter` is a builtin, `kl_estimator` because that is what it marks."""

_SCALARS: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True)
class Param:
    """One keyword-only parameter of an algorithm: its annotation as source text and, unless required, its default."""

    name: str
    annotation: str
    required: bool
    default: Any = None

    def accepts(self, value: object) -> bool:
        """Whether `value` fits the annotation: scalars, `Literal[...]`, `None` and unions of these.

        An int is a valid float, a bool is not a number. An annotation of any other form accepts everything: a user's
        function checks what only it understands.
        """
        return not self.annotation or _fits(ast.parse(self.annotation, mode="eval").body, value)

    def __str__(self) -> str:
        suffix = "" if self.required else f" = {self.default!r}"
        return f"{self.name}: {self.annotation or 'Any'}{suffix}"


@dataclass(frozen=True)
class Entry:
    """A registered or user-named algorithm: where it lives and what it takes."""

    kind: str
    name: str
    module: str
    function: str
    params: dict[str, Param]
    doc_first_line: str


def _fits(node: ast.expr, value: object) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(left, value) or _fits(right, value)
        case ast.Constant(value=None):
            return value is None
        case ast.Name(id=name) if name in _SCALARS:
            return isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            elements = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return any(value == ast.literal_eval(e) and type(value) is type(ast.literal_eval(e)) for e in elements)
        case _:
            return True


def _params(function: ast.FunctionDef) -> dict[str, Param]:
    params = {}
    for arg, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        annotation = ast.unparse(arg.annotation) if arg.annotation else ""
        if default is None:
            params[arg.arg] = Param(arg.arg, annotation, required=True)
            continue
        try:
            value = ast.literal_eval(default)
        except ValueError as error:
            raise ValueError(
                f"{function.name}: default of {arg.arg!r} is {ast.unparse(default)!r}, which is not a literal; "
                "write the value out, defaults are read from the source"
            ) from error
        params[arg.arg] = Param(arg.arg, annotation, required=False, default=value)
    return params


def _entry(function: ast.FunctionDef, kind: str, name: str, module: str) -> Entry:
    doc = ast.get_docstring(function) or ""
    return Entry(kind, name, module, function.name, _params(function), doc.split("\n", 1)[0])


def _registration(decorator: ast.expr) -> tuple[str, str] | None:
    """(kind, name) of `@kind("name")` or `@registry.kind("name")`; None for any other decorator."""
    match decorator:
        case ast.Call(
            func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
        ) if called in DECORATOR_KIND:
            return DECORATOR_KIND[called], name
    return None


def top_level_functions(path: Path) -> Iterator[ast.FunctionDef]:
    """The functions that `path` defines at its top level."""
    for node in ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body:
        if isinstance(node, ast.FunctionDef):
            yield node


def registrations(path: Path, module: str) -> Iterator[Entry]:
    """Every registered function of the source file `path`, which imports as `module`."""
    for function in top_level_functions(path):
        for decorator in function.decorator_list:
            if found := _registration(decorator):
                yield _entry(function, *found, module)


def function_entry(path: Path, module: str, function: str, kind: str) -> Entry | None:
    """The top-level function `function` of `path` as an algorithm of `kind` named by its import path."""
    for node in top_level_functions(path):
        if node.name == function:
            return _entry(node, kind, f"{module}:{function}", module)
    return None
