"""Rewards that compare the answer's text, behind its thoughts, with the row's `answer`."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asyncrl.api import run_in, verdict, without_thoughts
from asyncrl.api.reward import right_answers, row_check

MAX_NUMBER_CHARS = 100
GROUPED = r"\d{1,3}(?:[,'’]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:\.\d{3})+(?=,\d)|\d{1,3}(?:\.\d{3}){2,}"
"""Digits in groups: `1,200`, `1'200`, `1,00,000` (Indian), `1.200,5` and `1.200.000`. `1.200` is 1.2."""
PLAIN = rf"(?:{GROUPED})(?:[.,]\d+)?(?![,\d])|\d+(?:\.\d*)?|\.\d+"
_LAST = re.compile(
    r"(?:(?<![\w.,^)\]}%])(?P<sign>[-+]))?(?<![\w^])(?<!\d[.,:/])(?:\\?[$€£¥]\s?)?"
    r"(?:(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*\{\s*(?P<top>-?\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}"
    r"|(?:(?P<whole2>\d+)\s+)?(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+)"
    rf"|(?P<plain>{PLAIN})"
    r"(?:[eE](?P<e>[-+]?\d{1,2})|\s?(?:\\times|\\cdot|[x×·*])\s?10\s?\^\s?\{?(?P<power>[-+]?\d{1,2})\}?)?)"
    r"(?![\d_^]|[.,:/]\d|[eE][-+]?\d)",
    re.ASCII,
)
"""A number within text. A sign after a word, a number or a bracket does not count (`pages 10-15`); no times, dates,
bases (`101_2`) and powers.
"""
_SIGN_APART = re.compile(r"([{(\[=#]\s*)-\s+(?=[\d.\\$])")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SPACE_IN_NUMBER = re.compile("(?<=\\d)(?:\\\\,|[\u00a0\u2009\u202f])(?=\\d{3})")
_TYPESET = str.maketrans({"\u2212": "-", "\u2012": "-", "\ufe63": "-", "\uff0d": "-", "\uff0b": "+", "\uff05": "%"})
_DASH_AS_SIGN = re.compile(r"(?<![\w)\]}%])\u2013(?=[\d.\\$€£¥])")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _numbers(data: Mapping[str, Any]) -> list[Fraction]:
    """Return the numbers of the row's answers.

    Raises:
        ValueError: there is none.
    """
    texts = right_answers(data)
    numbers = [number for text in texts if (number := last_number_in(text)) is not None]
    if not numbers:
        raise ValueError(f"the row's answer {texts[0]!r:.60} holds no number, which numeric_match would compare")
    return numbers


@row_check(right_answers)
@verdict
@run_in("loop")
def exact_match(data: Mapping[str, Any], completion: str, *, ignore_case: bool = False) -> float:
    """Return 1 if the answer equals `data["answer"]` (or one of a list), ignoring blanks at both ends, else 0."""
    given = without_thoughts(completion).strip()
    wanted = [text.strip() for text in right_answers(data)]
    if ignore_case:
        given, wanted = given.casefold(), [text.casefold() for text in wanted]
    return 1.0 if given in wanted else 0.0


@row_check(_numbers)
@verdict
@run_in("loop")
def numeric_match(data: Mapping[str, Any], completion: str, *, tolerance: float = 0.0) -> float:
    """Return 1 if the answer's last number is that of `data["answer"]` within `tolerance` (absolute), else 0.

    A number is as `last_number_in` reads it; without one the reward is 0.

    Raises:
        ValueError: the row's answer holds no number.
    """
    given, numbers = last_number_in(without_thoughts(completion)), _numbers(data)
    return float(given is not None and any(abs(given - wanted) <= Fraction(tolerance) for wanted in numbers))


@row_check(right_answers)
@run_in("loop")
def f1(data: Mapping[str, Any], completion: str) -> float:
    """Return the F1 score of the answer's words and those of `data["answer"]` (of a list: the best), from 0 to 1.

    The harmonic mean of precision and recall over words, as for SQuAD (arXiv:1606.05250): in lower case, without
    punctuation and English articles. Two texts without a word agree.
    """
    given = _words(without_thoughts(completion))
    return max(_f1(given, _words(text)) for text in right_answers(data))


def last_number_in(text: str) -> Fraction | None:
    """Return the value of the last number in `text`: of digits with or without groups, a fraction, a mixed number or
    one with a power of ten. None without one, or if it is longer than `MAX_NUMBER_CHARS`.
    """
    last = None
    text = _SIGN_APART.sub(r"\1-", with_plain_digits(text[-10_000:]))
    for last in _LAST.finditer(text):  # noqa: B007
        pass
    if last is None or len(last[0]) > MAX_NUMBER_CHARS:
        return None
    if last["plain"]:
        value = plain_value(last["plain"]) * Fraction(10) ** int(last["e"] or last["power"] or 0)
    else:
        top, bottom = int(last["top"] or last["top2"]), int(last["bottom"] or last["bottom2"])
        if bottom == 0:
            return None
        value = int(last["whole"] or last["whole2"] or 0) + Fraction(top, bottom)
    return -value if last["sign"] == "-" else value


def plain_value(digits: str) -> Fraction:
    """Return the value of what `PLAIN` matches."""
    grouped = re.match(GROUPED, digits, re.ASCII)
    head = re.sub(r"\D", "", grouped[0]) if grouped else ""
    return Fraction(head + digits[grouped.end() if grouped else 0 :].replace(",", "."))


def with_plain_digits(text: str) -> str:
    """Return `text` with ASCII's digits, signs and group separators in place of typeset ones: `−5`, `５`, `1 200`."""
    text = _SPACE_IN_NUMBER.sub(",", text.replace("{,}", ","))
    if text.isascii():
        return text
    text = _DASH_AS_SIGN.sub("-", _VULGAR.sub(_fraction, text.translate(_TYPESET)))
    return _NOT_ASCII.sub(lambda found: str(unicodedata.decimal(found[0], found[0])), text)


def _fraction(found: re.Match[str]) -> str:
    """Return a character such as `½` as `1/2`, apart from a number before it."""
    apart = " " if found.string[: found.start()][-1:].isdigit() else ""
    return apart + unicodedata.normalize("NFKC", found[0]).replace("\u2044", "/")


def _words(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(given: Counter[str], wanted: Counter[str]) -> float:
    words = given.total() + wanted.total()
    return 2 * (given & wanted).total() / words if words else 1.0
