"""Residence of guests on the trainer's devices: the memory that they have released, and their spans in the timeline."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from asyncrl.comm.names import GuestMemory
from asyncrl.manager.fleet.guests.turns import GuestTurns
from asyncrl.observe import observer


async def _not_recorded(server: int, memory: GuestMemory | None) -> None:
    """Record nothing: without `on_memory` no later manager reads it."""


class Residence:
    """The residence of guests on their devices.

    Args:
        guests: knows which servers are guests.
        kind: process kind of the servers.

    Attributes:
        memory: by index, the guests whose memory is released, or may be; `on_memory` records each change.
        wake_s: seconds that the last woken guest took until it served.
    """

    def __init__(self, guests: GuestTurns, kind: str) -> None:
        self._guests, self._kind = guests, kind
        self._since: dict[int, float] = {}
        self.memory: dict[int, GuestMemory] = {}
        self.on_memory: Callable[[int, GuestMemory | None], Awaitable[None]] = _not_recorded
        self.wake_s = 0.0

    def lane(self, server: int) -> str:
        """Return the name of the process of a server, which is its lane in the timeline."""
        return f"{self._kind}/{server}"

    def registered(self, server: int, url: str) -> None:
        """Record a new process of the server, which has its memory on the device unless it has released it."""
        memory = self.memory.get(server)
        if memory is None or memory.url != url:
            self.entered(server)

    def entered(self, server: int) -> None:
        """Record that the server has memory on its device from now on, if it had none."""
        self._since.setdefault(server, time.time())

    def left(self, server: int) -> None:
        """Write the span in which the server had memory on its device, if it is a guest."""
        since = self._since.pop(server, None)
        if since is not None and server in self._guests:
            observer.span("resident", since, time.time(), lane=self.lane(server))

    def all_left(self) -> None:
        """Call `left` for all servers."""
        for server in [*self._since]:
            self.left(server)

    async def record(self, server: int, memory: GuestMemory | None) -> None:
        """Record the state of the guest's memory, before it changes and afterwards; None: it has all of it."""
        if memory is None:
            self.memory.pop(server, None)
        else:
            self.memory[server] = memory
        await self.on_memory(server, memory)
