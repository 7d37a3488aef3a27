"""Reward for the form of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.api import run_in, without_thoughts


@run_in("process")
class FormatReward:
    """1 if the whole answer matches a regular expression, else 0; runs in a process, as an expression may never end.

    Args:
        pattern: Python's `re`; `.` also matches a newline.
        anywhere: a match of any part of the answer is enough.
        thoughts: the pattern describes the answer with its thoughts; False: only what is behind them.

    Raises:
        ValueError: the pattern is not a valid regular expression.
    """

    def __init__(self, *, pattern: str, anywhere: bool = False, thoughts: bool = True) -> None:
        try:
            compiled = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
        self._matches = compiled.search if anywhere else compiled.fullmatch
        self._thoughts = thoughts

    def __call__(self, data: Mapping[str, Any], completion: str) -> float:
        """Return the reward of `completion`; the row does not matter."""
        return 1.0 if self._matches(completion if self._thoughts else without_thoughts(completion)) else 0.0
