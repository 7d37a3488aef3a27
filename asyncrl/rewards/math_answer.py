r"""Reward for maths with a final answer: is it the right one, whatever the way it was written?

The final answer of a text is the content of its last `\boxed{...}`, else what follows its last `####` (the GSM8K form).

1. What does not change the answer goes: `$`, `\$` and other currencies, `\(...\)`, `\left`, a final full stop, units,
   `x =` where only one of the two has it.
2. Two plain numbers (`1,200`, `1{,}200`, `1200.0`, `\frac{2400}{2}`, `7\frac12`, `12 thousand`) are compared exactly;
   commas count only between groups of three digits. A percentage may be given with its sign, without, or as a fraction.
3. The same text without spaces is the same answer.
4. Anything else is for the `math-verify` package: expressions, intervals, sets, equations. It compares floating point
   to six decimals and works in a process's main thread alone, so the reward runs in a process of the pool.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asyncrl.api import run_in, verdict

MAX_ANSWER_CHARS = 200
"""A longer "answer" is rambling; parsing it would only cost time (and an endless digit string much of it)."""
VERIFY_LIMIT_S = 1
"""For math-verify to parse an answer, and again to compare: in whole seconds. Beyond it the answer is wrong."""

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.,])[-+]?(?:{_PLAIN})(?![\d])", re.ASCII)
_VALUE = re.compile(rf"([-+]?)\s*({_PLAIN})", re.ASCII)
"""No exponents: `Fraction("1e999999999")` would compute for ever."""
_FRACTION = re.compile(
    r"([-+]?)\s*(?:(\d+)\s*(?=\\)|(\d+)\s+(?=\d))?"
    r"(?:\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(-?\d+)\s*/\s*(\d+))",
    re.ASCII,
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_SHORT_UNITS = "cm|mm|km|kg|mg|ml|mL|dl|ft|in|yd|mi|lb|lbs|oz|hr|hrs|h|min|mins|sec|secs|ms|mph|km/h|am|pm|USD"
_UNITS = re.compile(
    r"(?<=[\d.}%])\s*(?:"
    r"\^\s*(?:\{\s*)?\\circ(?:\s*\})?"  # degrees
    r"|(?:\\[ ,;!]|~)*\\(?:text|mathrm|textrm|mbox|textbf|mathbf)\s*\{[^{}\d=<>+*/^]*\}(?:\s*\^\s*\{?\s*\d\s*\}?)?"
    rf"|(?:{_SHORT_UNITS})\b(?:\s*\^\s*\{{?\s*\d\s*\}}?)?"
    r"|(?<=[\s])(?:[A-Za-z][A-Za-z'.-]+)(?:\s+(?:per\s+)?[A-Za-z][A-Za-z'.-]*)*"
    r")\s*$"
)
_ASSIGNED = re.compile(r"^\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*=(?!=)\s*")
_DECORATION = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]]|\\!|\\displaystyle|\\?[$€£¥]|[\n\t]")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)|\\[,;: ]|~")
"""Not those between digits: `12 00` is not 1200."""


@verdict
@run_in("process")
def math_answer_reward(data: Mapping[str, Any], completion: str, *, last_number: bool = False) -> float:
    """1 if the final answer of `completion` agrees with that of `data["answer"]`, else 0.

    Args:
        data: its `answer` is the answer itself, or a worked solution that ends in one of the two forms.
        completion: the answer's text.
        last_number: where the completion has neither form, take its last number. Off by default: with it a model is
            never taught to mark its answer.
    """
    expected = final_answer(str(data["answer"])) or str(data["answer"])
    given = final_answer(completion)
    if given is None and last_number:
        numbers = _NUMBER_IN_TEXT.findall(completion)
        given = numbers[-1] if numbers else None
    return 1.0 if given is not None and answers_agree(given, expected) else 0.0


def final_answer(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, else the rest of the line after the last `####`; None without either."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n")[0].strip() if marker else None


def answers_agree(given: str, expected: str) -> bool:
    """Whether `given` is the answer `expected`; see the module's docstring."""
    if max(len(given), len(expected)) > MAX_ANSWER_CHARS:
        return False
    given, expected = _bare(given), _bare(expected)
    if ("=" in given) != ("=" in expected):
        given, expected = _ASSIGNED.sub("", given), _ASSIGNED.sub("", expected)
    if not given or not expected:
        return False
    given_value, expected_value = as_number(given), as_number(expected)
    if given_value is not None and expected_value is not None:
        if _is_percent(given) != _is_percent(expected):
            signed, bare = (given_value, expected_value) if _is_percent(given) else (expected_value, given_value)
            return bare in (signed, signed / 100)
        return given_value == expected_value
    return _SPACES.sub("", given) == _SPACES.sub("", expected) or _verified(given, expected)


def as_number(text: str) -> Fraction | None:
    """The exact value of a plain number, a fraction or a mixed number, its unit and percent sign left aside; else None.

    None too for one longer than `MAX_ANSWER_CHARS`.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    plain, scale = _without_unit(_bare(text))
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    if match := _VALUE.fullmatch(plain):
        value = Fraction(match[2].replace(",", ""))
    elif match := _FRACTION.fullmatch(plain):
        _, *parts = match.groups()
        whole = parts[0] or parts[1] or 0
        numerator, denominator = (int(next(part for part in pair if part)) for pair in _halves(parts))
        if denominator == 0 or (whole and numerator < 0):
            return None
        value = int(whole) + Fraction(numerator, denominator)
    else:
        return None
    return scale * (-value if match[1] == "-" else value)


def _halves(parts: list[str | None]) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    _, _, braced_top, bare_top, braced_bottom, bare_bottom, top, bottom = parts
    return (braced_top, bare_top, top), (braced_bottom, bare_bottom, bottom)


def _bare(text: str) -> str:
    text = _DECORATION.sub("", text).replace("{,}", ",")
    text = re.sub(r"(?<=\d)\\,(?=\d{3})", ",", text)
    return text.strip().removesuffix(".").strip()


def _without_unit(text: str) -> tuple[str, int]:
    """`text` without a unit after its number, and the factor that a word such as `thousand` there stands for."""
    match = _UNITS.search(text)
    if match is None:
        return text, 1
    words = re.findall(r"[a-z]+", match[0].lower())
    if "percent" in words:
        return f"{text[: match.start()]}%", 1
    scale = 1
    for word in words:
        scale *= _SCALES.get(word, 1)
    return text[: match.start()].strip(), scale


def _is_percent(text: str) -> bool:
    return _without_unit(text)[0].endswith("%")


def _verified(given: str, expected: str) -> bool:
    """What math-verify says.

    Raises:
        RuntimeError: not in a main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "math_answer_reward works in a process's main thread; leave reward.run_in at auto or process"
        )
    import math_verify  # takes 0.4 s and sympy: only the processes of the pool pay for it

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # each answer it cannot read would be a traceback
    parsed = [
        math_verify.parse(f"${_without_unit(text)[0]}$", parsing_timeout=VERIFY_LIMIT_S) for text in (expected, given)
    ]
    if not all(parsed):
        return False
    return bool(math_verify.verify(parsed[0], parsed[1], timeout_seconds=VERIFY_LIMIT_S))


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
