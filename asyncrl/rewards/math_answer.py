r"""Reward for word problems: is the final number right, whatever the way it was written?

The final answer of a text is the content of its last `\boxed{...}`, else what follows its last `####` (the GSM8K form).
Two answers agree if they are the same number (`1,200`, `$1200`, `1200.0` and `\frac{2400}{2}` are), else if they are
the same text without spaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")
_VALUE = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+|\d+/\d+)", re.ASCII)
"""No exponents: `Fraction("1e999999999")` would compute for ever."""
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", re.ASCII)
_DECORATION = str.maketrans("", "", "$%, \t\n")
MAX_ANSWER_CHARS = 200
"""A longer "answer" is rambling; parsing it would only cost time (and an endless digit string much of it)."""


def math_answer_reward(data: Mapping[str, Any], completion: str, *, last_number: bool = False) -> float:
    """1 if the final answer of `completion` agrees with that of `data["answer"]`, else 0.

    Args:
        data: its `answer` is the number itself, or a worked solution that ends in one of the two forms.
        completion: the answer's text.
        last_number: where the completion has neither form, take its last number. Off by default: with it a model is
            never taught to mark its answer.
    """
    expected = final_answer(str(data["answer"])) or str(data["answer"])
    given = final_answer(completion)
    if given is None and last_number:
        numbers = _NUMBER.findall(completion)
        given = numbers[-1] if numbers else None
    return 1.0 if given is not None and answers_agree(given, expected) else 0.0


def final_answer(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, else the rest of the line after the last `####`; None without either."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() if marker else None


def answers_agree(left: str, right: str) -> bool:
    """Whether two final answers are the same number, or the same text where one is no number."""
    left_value, right_value = as_number(left), as_number(right)
    if left_value is not None and right_value is not None:
        return left_value == right_value
    left_text, right_text = left.translate(_DECORATION), right.translate(_DECORATION)
    return left_text == right_text and left_text != ""


def as_number(text: str) -> Fraction | None:
    """The exact value of an answer; None if it is no number, or longer than `MAX_ANSWER_CHARS`."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    plain = text.translate(_DECORATION).rstrip(".")
    latex = _FRACTION.fullmatch(plain)
    if latex:
        sign, numerator, denominator = latex.groups()
        value = as_number(f"{numerator}/{denominator}")
        return -value if value is not None and sign == "-" else value
    if not _VALUE.fullmatch(plain):
        return None
    try:
        return Fraction(plain)
    except ZeroDivisionError:
        return None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position in range(start, min(len(text), start + MAX_ANSWER_CHARS)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None
