"""The cores of one host, shared by all computations on it.

With one core per process no process slows another down. With fewer cores, they are shared by weight, and no computation
gets more than one core. The others share the part that it cannot use. The shares change whenever a computation begins
or ends. Computations whose speed changes are notified, so that they reschedule their next event. This is exact as long
as each computes with one thread.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

FIRST, LATER = 1024.0, 110.0
"""The kernel's weights of nice 0, for training on the CPU, and of nice 10, for everything else."""


class Computing(Protocol):
    """A computation on the cores."""

    def advance(self) -> None:
        """Compute up to now at the old speed, which is about to change."""
        ...

    def reschedule(self) -> None:
        """Reschedule the next event: the speed has changed."""
        ...


class Cores:
    """`count` cores; if infinitely many, no computation slows another down."""

    def __init__(self, count: float) -> None:
        self._count = count
        self._weights: dict[Computing, float] = {}
        self._speeds: dict[Computing, float] = {}

    def speed(self, computing: Computing) -> float:
        """Return the speed of a running computation, as a share of a core."""
        return self._speeds.get(computing, 1.0)

    def join(self, computing: Computing, weight: float = LATER) -> None:
        """Add a computation; no effect if it runs already."""
        if self._count < math.inf and computing not in self._weights:
            self._change({**self._weights, computing: weight})

    def leave(self, computing: Computing) -> None:
        """Remove a computation; no effect if it does not run."""
        if computing in self._weights:
            self._change({other: weight for other, weight in self._weights.items() if other is not computing})

    def _change(self, weights: dict[Computing, float]) -> None:
        """Set the weights and reschedule the computations whose speed changes, except one that joins or leaves."""
        speeds = self._shared(weights)
        changed = [each for each, speed in speeds.items() if self._speeds.get(each, speed) != speed]
        for each in changed:
            each.advance()
        self._weights, self._speeds = weights, speeds
        for each in changed:
            each.reschedule()

    def _shared(self, weights: dict[Computing, float]) -> dict[Computing, float]:
        if len(weights) <= self._count:
            return dict.fromkeys(weights, 1.0)
        speeds, left, of = {}, self._count, sum(weights.values())
        for each, weight in sorted(weights.items(), key=lambda item: -item[1]):
            speeds[each] = min(1.0, left * weight / of)
            left, of = left - speeds[each], of - weight
        return speeds

    async def work(self, seconds: float, weight: float = LATER) -> None:
        """Compute for this number of core-seconds."""
        if seconds > 0:
            await _Job(self, seconds).run(weight)


class _Job:
    """A computation of a number of core-seconds."""

    def __init__(self, cores: Cores, seconds: float) -> None:
        self._cores, self._left = cores, seconds
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._done = asyncio.Event()

    async def run(self, weight: float) -> None:
        """Run the computation to its end."""
        self._cores.join(self, weight)
        self.reschedule()
        try:
            await self._done.wait()
        finally:
            self._cancel()
            self._cores.leave(self)

    def lengthen(self, seconds: float) -> None:
        """Add this number of core-seconds to the computation."""
        self.advance()
        self._left += seconds
        self.reschedule()

    def advance(self) -> None:
        now = self._loop.time()
        self._left -= (now - self._at) * self._cores.speed(self)
        self._at = now

    def reschedule(self) -> None:
        self._cancel()
        self._timer = self._loop.call_later(max(0.0, self._left) / self._cores.speed(self), self._done.set)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Process:
    """A process on the cores. Because of the interpreter lock, even its threads compute one after the other.

    Attributes:
        used_s: core-seconds that it has computed.
    """

    def __init__(self, cores: Cores, weight: float = LATER) -> None:
        self._cores, self._weight, self._turn = cores, weight, asyncio.Lock()
        self._job: _Job | None = None
        self.used_s = 0.0

    async def work(self, seconds: float) -> None:
        """Compute for this number of core-seconds, after the earlier work."""
        if seconds <= 0:
            return
        async with self._turn:
            self.used_s += seconds
            self._job = _Job(self._cores, seconds)
            try:
                await self._job.run(self._weight)
            finally:
                self._job = None

    async def cut_in(self, seconds: float) -> None:
        """Compute for this number of seconds at once, in another thread: the running work takes longer by this time."""
        if self._job is None:
            await self.work(seconds)
            return
        self.used_s += seconds
        self._job.lengthen(seconds)
        await asyncio.sleep(seconds)
