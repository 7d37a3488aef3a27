"""Delays between retries."""

from __future__ import annotations

from dataclasses import dataclass

_DOUBLINGS = 64
"""Limit of the doublings: enough for any `last_s`, and a float does not overflow even if a call fails for days."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double with every failure in a row, from `first_s` up to `last_s` seconds.

    >>> [Backoff(0.5, 3.0).delay(failures) for failures in (1, 2, 3, 4, 5)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """

    first_s: float
    last_s: float

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after `failures` failures in a row, at least 1."""
        return min(self.last_s, self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS))
