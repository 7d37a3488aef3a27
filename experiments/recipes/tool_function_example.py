"""An example to copy: a tool that is a function. Its name, signature and docstring are what the model is told."""

from __future__ import annotations

from asyncrl.api import ToolResult


def calculator(expression: str, *, reward: float = 0.0) -> ToolResult:
    """Multiply, add and subtract whole numbers.

    Args:
        expression: for example "12*34+5".
    """
    product, operator, last = expression, "", "0"
    for sign in "+-":
        if sign in expression:
            product, operator, last = expression.partition(sign)
    left, _, right = product.partition("*")
    value = int(left) * int(right) + (-1 if operator == "-" else 1) * int(last)
    return ToolResult(str(value), reward=reward)
