"""Reference answers in rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
