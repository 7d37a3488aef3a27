"""How a call of users' code fails."""

from __future__ import annotations


class UserCodeError(RuntimeError):
    """A call of users' code failed: it raised, took too long, or its process died. It costs the sample at hand.

    Attributes:
        label: what was called, as it is counted: `reward my.py:score`.
        still_runs: it was given up in a thread, which goes on.
    """

    def __init__(self, label: str, what: str, *, still_runs: bool = False) -> None:
        super().__init__(f"{label} {what}")
        self.label = label
        self.still_runs = still_runs


def failed_label(error: BaseException | None) -> str | None:
    """What users' code `error` is due to, looking through causes and groups; None if none is known."""
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:  # a group may be the cause of what it holds
            continue
        seen.add(id(error))
        if isinstance(error, UserCodeError):
            return error.label
        waiting.append(error.__cause__)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
    return None
