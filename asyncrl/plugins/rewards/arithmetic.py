"""The demo's reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.api import run_in, verdict, without_thoughts
from asyncrl.api.reward import right_answers, row_check


@row_check(right_answers)
@verdict
@run_in("loop")
def arithmetic_reward(data: Mapping[str, Any], completion: str) -> float:
    """Return 1 if the text after the answer's `#` is exactly `data["answer"]`, else 0; the steps before it do not
    count.
    """
    _, marker, result = without_thoughts(completion).partition("#")
    return 1.0 if marker and result in right_answers(data) else 0.0
