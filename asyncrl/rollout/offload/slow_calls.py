"""Which calls of users' code deserve a line in the log. Pure: the caller brings the clock."""

from __future__ import annotations

from collections import Counter

QUIET_S = 10.0
"""Between two lines about the same code; what is slow once is mostly slow a thousand times."""


class SlowCalls:
    """Names calls that took `limit_s` or longer, each code at most once in `QUIET_S`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def note(self, label: str, seconds: float, now: float) -> str | None:
        """The line about a call that took `seconds` and ended at `now`; None where it needs none."""
        if seconds < self._limit_s:
            return None
        if now - self._said_at.get(label, -QUIET_S) < QUIET_S:
            self._unsaid[label] += 1
            return None
        self._said_at[label] = now
        more = self._unsaid.pop(label, 0)
        before = f", and {more} more of its calls were slow since the last such line" if more else ""
        return f"{label} took {seconds:.3g} s{before}"
