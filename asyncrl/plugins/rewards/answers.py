"""Reference answers in rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def right_answers(data: Mapping[str, Any]) -> list[str]:
    """`data["answer"]` as texts: one, or of a list each.

    Raises:
        ValueError: the row has none, which would make every answer wrong without a word.
    """
    answer = data.get("answer")
    answers = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not answers or any(each is None for each in answers):
        wrong = f"answer is {answer!r}" if "answer" in data else f"fields are {', '.join(data)}, with no answer"
        raise ValueError(f"the row's {wrong}: give each row one, or name its column in dataset.fields.answer")
    return [str(each) for each in answers]
