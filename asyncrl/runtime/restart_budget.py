"""How often something that dies may be started again."""

from __future__ import annotations

from collections import deque


class RestartBudget:
    """At most `limit` restarts within any `window_s` seconds.

    What dies of something passing is worth restarting: others carry on meanwhile and it joins them again. What dies
    again and again has a cause that a person must see. Pure: the caller brings the clock.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._times: deque[float] = deque()

    def spend(self, now_s: float) -> bool:
        """True if a restart at `now_s` is within the budget, which it then uses up."""
        while self._times and now_s - self._times[0] >= self._window_s:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return False
        self._times.append(now_s)
        return True
