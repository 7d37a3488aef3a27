"""Which model functions are registered, without importing torch: read from the sources of `asyncrl.trainer`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import asyncrl.trainer

REGISTRATION = "model_function"
"""Name of the decorator that registers a model function in `asyncrl.trainer`."""


@cache
def known_functions() -> frozenset[str]:
    """Names of the registered model functions, read from the sources: their modules import torch, this one does not."""
    folder = Path(asyncrl.trainer.__file__).parent
    names = (name for source in sorted(folder.rglob("*.py")) for name in registered_names(source.read_text()))
    return frozenset(names)


def registered_names(source: str) -> list[str]:
    """The names that functions in the Python text `source` are registered under."""
    return [
        str(decorator.args[0].value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == REGISTRATION
        and decorator.args
        and isinstance(decorator.args[0], ast.Constant)
    ]
