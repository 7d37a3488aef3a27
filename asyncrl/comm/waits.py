"""How long one process waits for another, and how.

The waits that several places share are limits in seconds, each of one of the kinds below. What is left has a single
place and stands there, with its reason; `docs/faults.md` lists all.

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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")

BURST_S = 0.01
"""For what ends together to become one message, while somebody waits: a hundredth of the shortest useful step."""
GATHER_S = 0.05
"""For what happens shortly after to become part of a message that nobody waits for at once."""
LOOK_S = 0.5
"""Between two looks at what wakes nobody: a name, a process, a file, a counter of a peer. A request to stop that comes
meanwhile waits no longer than a person notices.
"""
ASK_S = 5.0
"""Between two questions for signs of life, at most a quarter of the limit that they guard; and between two looks at
what changes slowly.
"""
ANSWER_S = 5.0
"""For an answer that the caller can do without. A living process gives it in milliseconds, or in a second if all cores
of the machine are busy.
"""
CALL_S = 20.0
"""For an answer that the caller needs, beyond the time for which the call may be held. Only a suspended or stuck
process takes longer: when one dies, its connections break.
"""
HOLD_S = 5.0
"""For which a call is held until there is something to answer. Then the caller repeats it, which renews its lease."""
CLOSE_S = 0.4
"""For one connection to close. A RolloutWorker closes five, one after the other: trajectories, servers, tools,
endpoint, manager. So it stops in time if no other end responds.
"""
STOP_S = 3.0
"""For a process to end after it was asked to; then it is killed."""
PAUSE_S = 120.0
"""For which a call is repeated until the peer counts as dead. A pause of a minute, of either process, is no death."""
PATIENCE_S = 600.0
"""For what a person can mend or a large model needs: a full disk, ranks that take no trajectories, a start."""
REPEAT_S = 60.0
"""Within which the same message is not logged again."""
TOOL_S = 20.0
"""For a program that shows the state of a machine or a process. A sleeping GPU driver takes seconds to wake."""
TICK_S = 0.25
"""Between two reads of a running clock: a quarter of `SLICE_S`, as a busy event loop reads it late."""
SLICE_S = 1.0
"""Time by which a limit on silence may be wrong after a suspension."""
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


class Notifier:
    """Wakes all waiting tasks, in order of arrival. Like `asyncio.Condition` without the lock."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[bool], None] = {}

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        for waiter in list(self._waiters):
            _complete(waiter, True)

    def next(self) -> asyncio.Future[bool]:
        """Return a future that the next `notify` completes; cancel it when it is no longer needed."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        waiter.add_done_callback(self._waiters.pop)
        return waiter

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify`; return False if none came within `timeout_s` seconds."""
        waiter = self.next()
        limit = asyncio.get_running_loop().call_later(max(0.0, timeout_s), _complete, waiter, False)
        try:
            return await waiter
        finally:
            limit.cancel()


def _complete(waiter: asyncio.Future[bool], notified: bool) -> None:
    if not waiter.done():
        waiter.set_result(notified)


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
        paused: seconds in which it returns True do not count either; it is called once a second. None: all count.

    Raises:
        TimeoutError: from its block, after `limit_s` such seconds.
    """

    def __init__(self, limit_s: float, paused: Callable[[], bool] | None = None) -> None:
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
        if self._paused is None or not self._paused():
            self._left_s -= slice_s
        self._slice = loop.call_later(slice_s, self._next_slice)


async def run_on(loop: asyncio.AbstractEventLoop, work: Awaitable[_T]) -> _T:
    """Run `work` on `loop` from any loop and return its result; cancelling the caller cancels `work`."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(work), loop))


async def _awaited(work: Awaitable[_T]) -> _T:
    return await work
