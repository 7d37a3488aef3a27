"""Restart budget: a process alone, then the whole run, then nothing.

A process that dies of a passing cause is restarted while the others continue. A process that dies again and again has
a cause that its restart does not remove. The state of the others may be part of it, so the whole run is restarted once,
from its newest checkpoint. If the process dies as often after that, someone has to look at it, and the run ends. Pure
state: the caller brings the clock.

Example, 3 restarts in 600 s: a process that dies every minute is restarted three times. Its fourth death restarts the
whole run. It is restarted three times more, and the eighth death, within 600 s of the run's restart, ends the run.
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
        """Use one restart at `now_s`; return False if the budget has none left."""
        while self._times and now_s - self._times[0] >= self._window_s:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return False
        self._times.append(now_s)
        return True


class AfterDeath(Enum):
    """Processes that restart after a death."""

    alone = auto()
    """The process that died, or the brain that it belongs to."""
    whole_run = auto()
    """Everything, from the newest checkpoint."""
    nothing = auto()
    """The run is over."""


class RestartPolicy:
    """Decides what restarts after the death of a process that can be replaced.

    Args:
        limit: restarts of one process within `window_s`; 0: no restarts at all.
        window_s: seconds after which a restart no longer counts; the whole run restarts once within them.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._run = RestartBudget(min(limit, 1), window_s)
        self._processes: dict[str, RestartBudget] = {}

    def died(self, process: str, now_s: float, *, lost: bool = False) -> AfterDeath:
        """Record the death of `process` at `now_s`. Return what must restart; that restart counts from now on.

        Args:
            lost: True if the state that it held is lost, so that it cannot restart alone.
        """
        budget = self._processes.setdefault(process, RestartBudget(self._limit, self._window_s))
        if not lost and budget.spend(now_s):
            return AfterDeath.alone
        if self._run.spend(now_s):
            self._processes.clear()
            return AfterDeath.whole_run
        return AfterDeath.nothing
