"""Time in which this process ran, for limits on the silence of other processes.

A process may be suspended (SIGSTOP, a migrated virtual machine, a closed laptop). Afterwards a minute has passed
without a received message, although the other processes may have sent messages all the time. So a limit on their
silence leaves out gaps in which this process did not run.

`RunningClock` is for times that are compared later. A task reads the clock every `TICK_S`, and a gap of more than
`SLICE_S` between two reads is a pause of the process. `running_wait` and `RunningTimeout` are for a single wait. They
cut it into slices, and each slice counts at most its own length, even if it took longer.

    time      0   1   2   3 ................ 63  64  65
    reads     x   x   x   x   (suspended)     x   x   x
    clock     0   1   2   3                   3   4   5
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

TICK_S = 0.25
"""Between two reads of a running clock: a quarter of `SLICE_S`, as a busy event loop reads it late."""
SLICE_S = 1.0
"""Time by which a limit on silence may be wrong after a suspension."""


class RunningClock:
    """A clock without the gaps in which this process's event loop did not run. Call it for the time, in seconds.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._missed = 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._last > SLICE_S:
            self._missed += now - self._last
        self._last = now
        return now - self._missed

    async def keep(self) -> None:
        """Read the clock until cancelled. While this does not run, all time counts as a gap."""
        while True:
            self()
            await asyncio.sleep(TICK_S)


async def running_wait(*tasks: asyncio.Future[Any], limit_s: float) -> None:
    """Wait until one of `tasks` is done, or for `limit_s` seconds in which this process ran."""
    left_s = max(0.0, limit_s)
    while True:
        slice_s = min(left_s, SLICE_S)
        done, _ = await asyncio.wait(tasks, timeout=slice_s, return_when=asyncio.FIRST_COMPLETED)
        left_s -= slice_s
        if done or left_s <= 0:
            return


class RunningTimeout:
    """Like `asyncio.timeout`, but counts only seconds in which this process ran.

    Args:
        paused: seconds in which it returns True do not count either; it is called once a second.

    Raises:
        TimeoutError: from its block, after `limit_s` such seconds.
    """

    def __init__(self, limit_s: float, paused: Callable[[], bool] = lambda: False) -> None:
        self._left_s, self._paused = max(0.0, limit_s), paused
        self._timeout = asyncio.timeout(None)
        self._slice: asyncio.TimerHandle | None = None

    def expired(self) -> bool:
        """True if this timeout ended its block."""
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._next_slice()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._slice is not None:
            self._slice.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _next_slice(self) -> None:
        loop = asyncio.get_running_loop()
        if self._left_s <= 0:
            self._timeout.reschedule(loop.time())
            return
        slice_s = min(self._left_s, SLICE_S)
        if not self._paused():
            self._left_s -= slice_s
        self._slice = loop.call_later(slice_s, self._next_slice)
