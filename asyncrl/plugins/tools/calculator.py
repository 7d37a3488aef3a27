"""A calculator: arithmetic in Python's syntax, within bounds, so that no expression takes long or fills the memory."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.api import run_in

MAX_CHARS = 1000
MAX_BITS = 10_000
"""Largest integer in bits, also of intermediate results: about 3,000 digits."""

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan")},
    **{name: getattr(math, name) for name in ("asin", "acos", "atan", "floor", "ceil", "gcd")},
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}
_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}


@run_in("loop")
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example "(12.5 + 3) * 4"; also sqrt, exp, log,
            log2, log10, sin, cos, tan, asin, acos, atan, floor, ceil, gcd, abs, round, min, max, pi and e.

    Raises:
        ValueError: the expression is malformed, or its value is not real or too large.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_CHARS} are the most")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None
    try:
        value = _value(tree.body)
    except (OverflowError, ZeroDivisionError, TypeError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the value is not finite")
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(op, _value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_value(operand)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
        case _:
            raise ValueError(f"`{ast.unparse(node)[:80]}` is not arithmetic that the calculator knows")


def _binary(op: ast.operator, left: int | float, right: int | float) -> int | float:
    whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow) and whole and abs(left) > 1 and right > 0:
        if right * (abs(int(left)).bit_length() - 1) > MAX_BITS:
            raise ValueError(_TOO_LARGE)
    elif isinstance(op, ast.Div) and whole and right and left % right == 0:
        return _bounded(left // right)  # exact where a float would round
    return _bounded(_BINARY[type(op)](left, right))


_TOO_LARGE = f"the value is too large: integers have at most {MAX_BITS} bits"


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(_TOO_LARGE)
    if not isinstance(value, int | float):
        raise ValueError("the value is not a real number")
    return value
