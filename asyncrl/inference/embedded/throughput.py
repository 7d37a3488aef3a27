"""Load of the engine: seconds spent in steps, and tokens per second during them."""

from __future__ import annotations

INTERVAL_S = 0.1
"""Interval in seconds between readings of a working engine."""
WINDOW_S = 1.0
"""Longest time in seconds between two readings that gives a speed: the first reading after a pause does not."""


class WorkMeter:
    """Receives, after every step, the time in seconds and the number of tokens generated so far."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.tokens_per_s = 0.0
        self._read_at = 0.0
        self._tokens = 0

    def worked(self, begin: float, end: float, tokens: int) -> bool:
        """Record a step from `begin` to `end`; return True if a reading was due."""
        self.busy_seconds += end - begin
        passed = end - self._read_at
        if passed <= INTERVAL_S:
            return False
        if passed < WINDOW_S:
            self.tokens_per_s = (tokens - self._tokens) / passed
        self._read_at, self._tokens = end, tokens
        return True
