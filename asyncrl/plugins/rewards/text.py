"""Rewards that compare the answer's text, behind its thoughts, with the row's `answer`."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asyncrl.api import run_in, verdict, without_thoughts

MAX_NUMBER_CHARS = 100
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def right_answers(data: Mapping[str, Any]) -> list[str]:
    """Return `data["answer"]` as a list of texts; it may be one answer or a list.

    Raises:
        ValueError: the row has no answer; otherwise every completion would silently be wrong.
    """
    answer = data.get("answer")
    answers = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not answers or any(each is None for each in answers):
        wrong = f"answer is {answer!r}" if "answer" in data else f"fields are {', '.join(data)}, with no answer"
        raise ValueError(f"the row's {wrong}: give each row one, or name its column in dataset.fields.answer")
    return [str(each) for each in answers]


@verdict
@run_in("loop")
def exact_match(data: Mapping[str, Any], completion: str, *, ignore_case: bool = False) -> float:
    """Return 1 if the answer equals `data["answer"]` (or one of a list), ignoring blanks at both ends, else 0."""
    given = without_thoughts(completion).strip()
    wanted = [text.strip() for text in right_answers(data)]
    if ignore_case:
        given, wanted = given.casefold(), [text.casefold() for text in wanted]
    return 1.0 if given in wanted else 0.0


@verdict
@run_in("loop")
def numeric_match(data: Mapping[str, Any], completion: str, *, tolerance: float = 0.0) -> float:
    """Return 1 if the answer's last number is that of `data["answer"]` within `tolerance` (absolute), else 0.

    Commas count between groups of three digits only. Without a number in either the reward is 0.
    """
    given = _last_number(without_thoughts(completion))
    for text in right_answers(data):
        wanted = _last_number(text)
        if given is not None and wanted is not None and abs(given - wanted) <= Fraction(tolerance):
            return 1.0
    return 0.0


@run_in("loop")
def f1(data: Mapping[str, Any], completion: str) -> float:
    """Return the F1 score of the answer's words and those of `data["answer"]` (of a list: the best), from 0 to 1.

    The harmonic mean of precision and recall over words, as for SQuAD (arXiv:1606.05250): in lower case, without
    punctuation and English articles. Two texts without a word agree.
    """
    given = _words(without_thoughts(completion))
    return max((_f1(given, _words(text)) for text in right_answers(data)), default=0.0)


def _last_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(text[-10_000:])
    if not numbers or len(numbers[-1]) > MAX_NUMBER_CHARS:
        return None
    return Fraction(numbers[-1].replace(",", ""))


def _words(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _f1(given: Counter[str], wanted: Counter[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total())
