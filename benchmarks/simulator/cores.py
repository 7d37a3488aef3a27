"""The cores of one host, which everything that computes there shares evenly.

On a machine with a core for each process nobody takes another's time. Where there are fewer, n processes that compute
at once on c cores have c/n of a core each. That changes whenever one of them begins or ends, and those that compute are
told, so that they set their next event anew: exact, as long as each computes with one thread.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Computing(Protocol):
    """What computes on the cores."""

    def advance(self) -> None:
        """Compute up to now at the speed that there was: it changes."""
        ...

    def reschedule(self) -> None:
        """Set the next event anew: the speed has changed."""
        ...


class Cores:
    """`count` cores; infinitely many: nobody takes another's time."""

    def __init__(self, count: float) -> None:
        self._count = count
        self._computing: dict[Computing, None] = {}
        self.speed = 1.0
        """Of each that computes, as a share of a core."""

    def join(self, computing: Computing) -> None:
        """It computes from now on; harmless where it does already."""
        if computing not in self._computing:
            self._change({**self._computing, computing: None}, computing)

    def leave(self, computing: Computing) -> None:
        """It computes no more; harmless where it does not."""
        if computing in self._computing:
            self._change({other: None for other in self._computing if other is not computing}, computing)

    def _change(self, computing: dict[Computing, None], by: Computing) -> None:
        speed = min(1.0, self._count / max(1, len(computing)))
        others = [other for other in self._computing if other is not by]
        if speed == self.speed:
            self._computing = computing
            return
        for other in others:
            other.advance()
        self._computing, self.speed = computing, speed
        for other in others:
            other.reschedule()

    async def work(self, seconds: float) -> None:
        """Compute for so many seconds of a core."""
        if seconds <= 0:
            return
        job = _Job(self, seconds)
        self.join(job)
        job.reschedule()
        try:
            await job.done.wait()
        finally:
            job.cancel()
            self.leave(job)


class _Job:
    """A number of seconds to compute."""

    def __init__(self, cores: Cores, seconds: float) -> None:
        self._cores, self._left = cores, seconds
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.done = asyncio.Event()

    def advance(self) -> None:
        now = self._loop.time()
        self._left -= (now - self._at) * self._cores.speed
        self._at = now

    def reschedule(self) -> None:
        self.cancel()
        self._timer = self._loop.call_later(max(0.0, self._left) / self._cores.speed, self.done.set)

    def cancel(self) -> None:
        """It is not woken any more."""
        if self._timer is not None:
            self._timer.cancel()


class Process:
    """A process on the cores: it does one thing after the other."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._turn = cores, asyncio.Lock()

    async def work(self, seconds: float) -> None:
        """Compute for so many seconds of a core, once what came before is done."""
        async with self._turn:
            await self._cores.work(seconds)
