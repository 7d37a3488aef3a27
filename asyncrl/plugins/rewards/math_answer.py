r"""Reward for maths with a final answer, which may be written in any form.

The final answer of a text, behind its thoughts, is the content of its last `\boxed{...}`, else what follows its last
`####` (the GSM8K form), else the content of its last `<answer>...</answer>`.

1. Text that does not change the answer is removed: `$`, `\$` and other currencies, `\(...\)`, `\left`, Markdown's `**`,
   a final full stop, units, `x =` if only one of the two has it. Words that change a number (`18 and a half`, `18 minus
   two`) are not a unit, and if two known units differ (`3 am`, `3 pm`), so do the answers.
2. Two plain numbers (`1,200`, `1{,}200`, `1200.0`, `\frac{2400}{2}`, `7\frac12`, `12 thousand`) are compared exactly;
   commas count only between groups of three digits. A percentage may be given with its sign, without, or as a fraction.
3. The same text without spaces is the same answer.
4. The `math-verify` package compares everything else: expressions, intervals, sets, equations. It compares floating
   point to six decimals and works only in a process's main thread, so the reward runs in a process of the pool.
"""

from __future__ import annotations

import itertools
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Any

from asyncrl.api import run_in, verdict, without_thoughts
from asyncrl.api.reward import right_answers, row_check
from asyncrl.plugins.rewards.text import PLAIN, last_number_in, plain_value, with_plain_digits

MAX_ANSWER_CHARS = 200
"""Longest final answer that is parsed. A longer one is not an answer, and parsing it, or endless digits, would cost
time.
"""
VERIFY_LIMIT_S = 2.0
"""CPU time for math-verify to parse two answers and to compare them. Beyond it the answer is wrong."""

_VALUE = re.compile(
    rf"([-+]?)\s*({PLAIN})(?:[eE]([-+]?\d{{1,2}})|\s*(?:\\times|\\cdot|[x×·*])\s*10\s*\^\s*\{{?([-+]?\d{{1,2}})\}}?)?",
    re.ASCII,
)
"""No longer exponents: `Fraction("1e999999999")` would compute for ever."""
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:[.,]\d+)?", re.ASCII)
_FRACTION = re.compile(
    r"([-+]?)\s*(?:(\d+)\s*(?=\\)|(\d+)\s+(?=\d))?"
    r"(?:\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(-?\d+)\s*/\s*(\d+))",
    re.ASCII,
)
_ASSIGNED = re.compile(r"^\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*=(?!=)\s*")
_DECORATION = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]]|\\!|\\displaystyle|\\?[$€£¥]|[\n\t]")
_CURRENCY = re.compile(r"\b(?:USD?|EUR|GBP|Rs\.)\s*(?=\\?[$€£¥]|\d)")
_MICRO = re.compile("(?<=[\\d\\s])[\u00b5\u03bc](?=[mglsAVFH]\\b)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*((?:[-+\u2212]?[\d.]|\\[dt]?frac)[^\s$]*)")
"""A box without braces, as in `\boxed 18`."""
_STYLE = re.compile(
    r"\\(?:text|mathrm|textrm|mbox|textbf|mathbf|textit|mathit|textsf|mathsf|operatorname)\s*\{([^{}]*)\}"
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '’.,&-]+[^\W\d_]+)*")
"""Plain language: letters of any script, with blanks and punctuation between."""
_VARIABLES = re.compile(r"[abcxyz]+|[ABC]+")
"""Letters that may be a product of variables rather than a word."""
_TWO_LETTERS = re.compile(r"[^\W\d_]{2}")
_CHOICE = re.compile(r"\(?\s*(?P<letter>[A-Z])\s*\)?(?:[.):]*|(?:(?<=\))|[.):])\s+(?P<text>.*))", re.DOTALL)
"""A letter of a multiple choice, alone or before its text: `B`, `(B)`, `B.`, `(B) 18`."""
_ABOUT = re.compile(r"^(?:\\approx(?![a-z])|\\sim(?![a-z])|[≈~∼])\s*")
_NAMED_CHOICE = re.compile(
    r"(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*(?:is\s*)?:?\s*(?=\(?[A-Z]\b)", re.IGNORECASE
)
_RELATION = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?q?|[lg]t|neq?|leqslant|geqslant)(?![a-z])|\\pm|±")
_AS_WRITTEN = re.compile(r".*\d_[{(\s]*\d|\d{1,4}([-/.])\d{1,2}\1\d{1,4}\Z")
"""A number in another base or a date: compared as text."""
_TIME = re.compile(r"\d{1,2}:[0-5]\d(?!\d)")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)|\\[,;: ]|~")
"""Not those between digits: `12 00` is not 1200."""
_NAMED = re.compile(r"(?<![A-Za-z\\])(?:pi|infinity|infty)(?![A-Za-z])", re.IGNORECASE)
_TYPESET = (
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    ("×", r"\\times "),
    ("÷", r"\\div "),
    ("∞", r"\\infty "),
    ("²", "^2"),
    ("³", "^3"),
)
"""Signs that math-verify does not read, and their LaTeX."""
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SHORT_UNITS = "um|cm|mm|km|kg|mg|ml|mL|L|dl|ft|in|yd|mi|lb|lbs|oz|hr|hrs|h|min|mins|sec|secs|ms|mph|km/h|am|pm|USD"
_SAME_UNITS = (
    "um micrometer micrometre micron|mm millimeter millimetre|cm centimeter centimetre|m meter metre|"
    "km kilometer kilometre|in inch inche|ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|oz ounce|"
    "lb pound|ml milliliter millilitre|l liter litre|s sec second|min minute|h hr hour|day|week|month|year|am a.m|"
    "pm p.m|cent|dollar usd|euro|° degree|°c °celsius|°f °fahrenheit"
)
_UNIT_OF = {name: names.split()[0] for names in _SAME_UNITS.split("|") for name in names.split()}
_NO_UNITS = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|half|hal(?:f|ve)s|thirds?|fifths?|tenths?|hundredths?|thousandths?"
    r"|plus|minus|divided|multiplied|pi|sqrt|not|and an?)\b|^[^a-z]*(?:squared|cubed)\b",
    re.IGNORECASE,
)
"""Words after a number that change its value."""
_UNIT_NAME = r"[a-z.°]+(?:\s*\^\s*\d)?"
_LAST_UNIT = re.compile(
    rf"(?<=[\d.])[\s~]*(?:\\[ ,;!]\s*)*(sq(?:uare|\.)?\s|cu(?:bic|\.)?\s)?\s*({_UNIT_NAME})"
    rf"(?:\s*(?:/|per\s)\s*({_UNIT_NAME}))?\s*$"
)
_UNIT_SPELLINGS = (
    ("[µμ]|\\\\mu(?![a-z])", "u"),
    (r"\^\s*\{?\s*\\circ\s*\}?\s*|\bdegrees?\s+(?=[cf])", "°"),
    (r"\bmph\b", "mi/h"),
    (r"\bkm/?h\b|\bkph\b", "km/h"),
    (r"\s+squared|\^\s*\{\s*2\s*\}|²", "^2"),
    (r"\s+cubed|\^\s*\{\s*3\s*\}|³", "^3"),
)
_UNITS = re.compile(
    r"(?<=[\d.}%])\s*(?:"
    r"(?:\^\s*(?:\{\s*)?\\circ(?:\s*\})?|°)(?:\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CF]\s*\}?)?"  # degrees
    r"|(?:\\[ ,;!]|~)*\\(?:text|mathrm|textrm|mbox|textbf|mathbf)\s*\{[^{}\d=<>+*^]*\}(?:\s*\^\s*\{?\s*\d\s*\}?|[²³])?"
    rf"|(?:{_SHORT_UNITS})(?:\b|(?=[²³]))(?:\s*\^\s*\{{?\s*\d\s*\}}?|[²³])?"
    r"|(?<=[\s])(?:[A-Za-z][A-Za-z'./-]+)(?:\s+(?:per\s+)?[A-Za-z][A-Za-z'./-]*)*"
    r")\s*$"
)
r"""A unit after a number (`cm`, `dollars per hour`, `\text{ eggs}`), or words that change it."""


def _expected(data: Mapping[str, Any]) -> list[str]:
    """Return the row's final answers.

    Raises:
        ValueError: it has none, or one that nothing can agree with.
    """
    expected = [(text, final_answer(text)) for text in right_answers(data)]
    for text, answer in expected:
        if not (answer or text).strip():
            raise ValueError(
                "the row's answer is empty, which nothing can agree with: give it one, or leave the row out"
            )
        if len(answer or text) > MAX_ANSWER_CHARS or (not answer and "\n" in text.strip()):
            raise ValueError(
                f"the row's answer {text!r:.60} marks no final answer of at most {MAX_ANSWER_CHARS} characters: give "
                "one that ends in \\boxed{...} or #### ..., or name the final answer's column in dataset.fields.answer"
            )
    return [answer or text for text, answer in expected]


@row_check(_expected)
@verdict
@run_in("process")
def math_answer_reward(data: Mapping[str, Any], completion: str, *, last_number: bool = False) -> float:
    """1 if the final answer of `completion` agrees with that of `data["answer"]`, else 0.

    Args:
        data: its `answer` is the answer itself, a worked solution that ends in one of the two forms, or a list of
            these, any of which is right.
        completion: the answer's text.
        last_number: take the last number of a completion that has neither form. Off by default, because the model would
            then not learn to mark its answer.

    Raises:
        ValueError: the row has no answer, or one that nothing can agree with.
    """
    expected = _expected(data)
    completion = without_thoughts(completion)
    given = final_answer(completion)
    if given is None and last_number:
        number = last_number_in(completion)
        given = None if number is None else str(number)
    return 1.0 if given is not None and any(answers_agree(given, text) for text in expected) else 0.0


def final_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, else the line after the last `####`, else the
    content of the last `<answer>`; None without any.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, marker, rest = text.rpartition("####")
    if marker:
        return rest.strip().split("\n")[0].strip()
    tagged = _TAGGED.findall(text)
    return str(tagged[-1]).strip() if tagged else None


def answers_agree(given: str, expected: str) -> bool:
    """True if `given` is the answer `expected`; the rules are in the module's docstring."""
    if max(len(given), len(expected)) > MAX_ANSWER_CHARS:
        return False
    given, expected = _bare(given), _bare(expected)
    if ("=" in given) != ("=" in expected):
        given, expected = _ASSIGNED.sub("", given), _ASSIGNED.sub("", expected)
    if not given:
        return False
    given_answer, wanted = (_STYLE.sub(r"\1", text).strip() for text in (given, expected))
    if _SPACES.sub("", given_answer) == _SPACES.sub("", wanted):
        return True
    if (by_kind := _same_words(given_answer, wanted)) is not None:
        return by_kind
    if any(_AS_WRITTEN.match(text) for text in (given, expected)):
        return _as_written(given) == _as_written(expected)
    if _says_more(given) or _says_more(expected) or _units_differ(given, expected):
        return False
    given_value, expected_value = as_number(given), as_number(expected)
    if given_value is not None and expected_value is not None:
        if _is_percent(given) != _is_percent(expected):
            signed, bare = (given_value, expected_value) if _is_percent(given) else (expected_value, given_value)
            return bare in (signed, signed / 100)
        return given_value == expected_value
    if (given_value, expected_value) != (None, None) and (_RELATION.search(given) or _RELATION.search(expected)):
        return False
    return _verified(given, expected)


def _same_words(given: str, expected: str) -> bool | None:
    """Return whether two choices (`B` and `(B)`), times, or texts in plain language are the same; None for others."""
    choices = [_CHOICE.fullmatch(_NAMED_CHOICE.sub("", text)) for text in (given, expected)]
    if choices[0] and choices[1]:
        first, second = choices[0], choices[1]
        given_answer = {_words(match["text"]) for match in (first, second) if match["text"]}
        return first["letter"] == second["letter"] and len(given_answer) < 2
    if all(_WORDS.fullmatch(text) and _TWO_LETTERS.search(text) for text in (given, expected)):
        return None if all(map(_VARIABLES.fullmatch, (given, expected))) else _words(given) == _words(expected)
    if all(map(_TIME.match, (given, expected))):
        return _as_written(given) == _as_written(expected)
    return None


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\W_]+", text.casefold()))


def _as_written(text: str) -> str:
    return re.sub(r"[{}()\s~]|\\[ ,;!]|(?<=[ap])\.(?=m)", "", _STYLE.sub(r"\1", text).casefold())


def as_number(text: str) -> Fraction | None:
    """Return the exact value of a plain number, a fraction or a mixed number, its unit and percent sign left aside;
    else None.

    None too for one longer than `MAX_ANSWER_CHARS`.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    plain, scale = _without_unit(_bare(text))
    plain = plain.removesuffix("%").removesuffix("\\").strip()
    if _SPACED.fullmatch(plain):
        plain = plain.replace(" ", "")
    if match := _VALUE.fullmatch(plain):
        value = plain_value(match[2]) * Fraction(10) ** int(match[3] or match[4] or 0)
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
    text = _DECORATION.sub("", _CURRENCY.sub("", with_plain_digits(text)))
    text = _ABOUT.sub("", text.strip("*` \u00a0").removesuffix(".").strip())
    text = f"-{text[1:].lstrip()}" if text[:1] == "\u2013" else text
    return _MICRO.sub("u", text).strip()


def _is_percent(text: str) -> bool:
    return _without_unit(text)[0].endswith("%")


def _verified(given: str, expected: str) -> bool:
    """Return the verdict of math-verify.

    Raises:
        RuntimeError: not in a main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "math_answer_reward works in a process's main thread; leave reward.run_in at auto or process"
        )
    parse, verify = _math_verify()
    try:
        with _at_most(VERIFY_LIMIT_S):
            parsed = [parse(f"${_for_verify(text)}$", parsing_timeout=None) for text in (expected, given)]
            return all(parsed) and bool(verify(parsed[0], parsed[1], timeout_seconds=None))
    except _OutOfTimeError:
        return False


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Load math-verify's `parse` and `verify`, and use them once. The first use takes a second, which must not count
    towards an answer's limit.
    """
    import math_verify  # imports sympy; only processes of the pool do this

    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # it logs a traceback for each answer that it cannot parse
    one = math_verify.parse("$\\frac{1}{2}$", parsing_timeout=None)
    math_verify.verify(one, one, timeout_seconds=None)
    return math_verify.parse, math_verify.verify


class _OutOfTimeError(BaseException):
    """A time limit. Not an `Exception`, because sympy and math-verify catch those."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTimeError` in a block that takes more CPU time. A wall-clock limit would fail on a busy machine.

    The error is raised repeatedly until the block ends, because Python ignores errors raised in a `__del__` or in a
    callback of the garbage collector.
    """

    def stop(number: int, frame: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _for_verify(text: str) -> str:
    """Rewrite text so that math-verify reads it as LaTeX does: it would read `10^-3` as `10^{-}3`."""
    text = re.sub(r"\^(-\d+)", r"^{\1}", _without_unit(text)[0])
    for sign, latex in _TYPESET:
        text = re.sub(sign, latex, text)
    return _NAMED.sub(lambda found: "\\pi" if found[0].lower() == "pi" else "\\infty", text)


def _last_boxed(text: str) -> str | None:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        bare = _BARE_BOX.findall(text)
        return str(bare[-1]) if bare else None
    start = boxes[-1].end()
    depth = 1
    for position in range(start, min(len(text), start + MAX_ANSWER_CHARS + 1)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def _says_more(text: str) -> bool:
    """True if a number is followed by words that change its value."""
    match = _UNITS.search(text)
    return match is not None and _NO_UNITS.search(match[0].replace("\\text", "")) is not None


def _units_differ(given: str, expected: str) -> bool:
    """True if both end in known units that differ, as `3 am` and `3 pm`, or `2 cm^2` and `2 cm^3`."""
    first, second = _known_unit(given), _known_unit(expected)
    if first is None or second is None:
        return False
    return first[0] != second[0] or (first[1] != second[1] and "" not in (first[1], second[1]))


def _without_unit(text: str) -> tuple[str, int]:
    """`text` without a unit after its number, and the factor that a word such as `thousand` there stands for."""
    match = _UNITS.search(text)
    if match is None or _says_more(text):
        return text, 1
    words = re.findall(r"(?<!\\)\b[a-z]+", match[0].lower())
    if "percent" in words:
        return f"{text[: match.start()]}%", 1
    scale = 1
    for word in itertools.takewhile(_SCALES.__contains__, words):
        scale *= _SCALES[word]
    return text[: match.start()].strip(), scale


def _known_unit(text: str) -> tuple[str, str] | None:
    """Return the unit that `text` ends in, with its power, and the unit after `per`; None if it is not known."""
    text = _STYLE.sub(r"\1", text).lower()
    for pattern, spelling in _UNIT_SPELLINGS:
        text = re.sub(pattern, spelling, text)
    match = _LAST_UNIT.search(text)
    if match is None:
        return None
    unit, per = (_unit(name or "") for name in match.groups()[1:])
    power = {"s": "^2", "c": "^3"}.get((match[1] or " ")[0], "")
    return (unit + power, per) if unit else None


def _unit(name: str) -> str:
    name, _, power = name.replace(" ", "").partition("^")
    name = name.rstrip(".")
    known = _UNIT_OF.get(name) or _UNIT_OF.get(name.removesuffix("s")) or ""
    return f"{known}^{power}" if known and power else known
