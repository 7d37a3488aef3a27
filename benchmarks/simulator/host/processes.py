"""Computations on one host besides engines and trainer, and the delay until the manager sees a new version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.comm.name_resolve.file import WAIT_LOOK_S
from asyncrl.manager.fleet.servers import Target
from simulator.host.cores import FIRST, Cores, Process
from simulator.setup import Host

NOTHING = Host(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Used if no host is given: no process slows another, and everything besides engines and trainer takes no time."""


class Processes:
    """The processes of a run on `host`. Each does one thing at a time. None: they take no time.

    `probe` is a server's process while it gets no requests; `rank` has priority on the cores.
    """

    def __init__(self, host: Host | None, cores: Cores) -> None:
        self.host = host or NOTHING
        self._cores = cores
        self.manager, self.master, self.probe = (Process(cores) for _ in range(3))
        self.rank = Process(cores, FIRST)
        self._running: set[asyncio.Task[None]] = set()

    def worker(self) -> Process:
        """Build another RolloutWorker's process."""
        return Process(self._cores)

    async def receive(self) -> None:
        """Receive a trajectory in a thread of the rank, before it is acknowledged."""
        await self.rank.cut_in(self.host.receive_s)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`, for which nothing waits."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


class Announcements:
    """New versions and the time at which the manager sees them: at the next look of name resolution, which come
    `WAIT_LOOK_S` apart. If not `polled`, the manager sees a version at once.
    """

    def __init__(self, tell: Callable[[Target], None], *, polled: bool) -> None:
        self._tell, self._polled = tell, polled
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def announce(self, target: Target) -> None:
        """Publish `target`."""
        delay_s = WAIT_LOOK_S - (self._loop.time() - self._began) % WAIT_LOOK_S if self._polled else 0.0
        self._loop.call_later(delay_s, self._tell, target)
