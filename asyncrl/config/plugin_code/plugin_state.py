"""State of a user's plug-in in checkpoints: plain data that survives JSON unchanged."""

from __future__ import annotations

import math
from typing import Any


def plain_state(state: Any, where: str = "state()") -> Any:
    """Return a copy of `state` as a checkpoint restores it: tuples become lists.

    Raises:
        TypeError: a value would not survive JSON unchanged; the message names the value and its place.
    """
    if state is None or isinstance(state, (str, bool, int)):
        return state
    if isinstance(state, float):
        if not math.isfinite(state):
            raise TypeError(f"{where} is {state}, which JSON does not have")
        return state
    if isinstance(state, (list, tuple)):
        return [plain_state(each, f"{where}[{index}]") for index, each in enumerate(state)]
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}, which JSON would restore as text; use str(...) or a list"
                )
        return {key: plain_state(each, f"{where}[{key!r}]") for key, each in state.items()}
    raise TypeError(
        f"{where} is a {type(state).__name__}; state must be plain data for JSON: texts, numbers, lists, mappings"
    )
