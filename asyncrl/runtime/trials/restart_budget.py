"""Restart budget: a process alone, then the whole run, then nothing.

What dies of something passing is worth restarting: others carry on meanwhile and it joins them again. What dies again
and again has a cause that restarting does not mend; perhaps the state that the others hold is part of it, so the whole
run is started again once, from its newest checkpoint. What dies as often after that has a cause that a person must see.
Pure: the caller brings the clock.

Example, 3 restarts in 600 s: a process that dies every minute is started again three times, with its fourth death the
whole run is; then three times more, and with the eighth death, still within 600 s of the whole run's restart, it ends.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto


class RestartBudget:
    """At most `limit` restarts within any `window_s` seconds."""

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


class AfterDeath(Enum):
    """Processes that restart after a death."""

    alone = auto()
    """The process that died."""
    whole_run = auto()
    """Everything, from the newest checkpoint."""
    nothing = auto()
    """The run is over."""


class RestartPolicy:
    """Decides what is started again after the death of a process that can be replaced; see the module's docstring.

    Args:
        limit: restarts of one process within `window_s`; with 0 nothing is ever started again.
        window_s: seconds after which a restart is forgotten; the whole run is started again once within as many.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._run = RestartBudget(min(limit, 1), window_s)
        self._processes: dict[str, RestartBudget] = {}

    def died(self, process: str, now_s: float, *, lost: bool = False) -> AfterDeath:
        """`process` died at `now_s`: what is started again counts from here on.

        `lost`: what it held is gone, so that it cannot be started again alone.
        """
        budget = self._processes.setdefault(process, RestartBudget(self._limit, self._window_s))
        if not lost and budget.spend(now_s):
            return AfterDeath.alone
        if self._run.spend(now_s):
            self._processes.clear()
            return AfterDeath.whole_run
        return AfterDeath.nothing
