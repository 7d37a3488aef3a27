"""A guest: a server on a device that the trainer needs from time to time (`asyncrl.manager.fleet.guests.guests`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Never

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver, NameResolveTimeout
from asyncrl.comm.name_resolve.errors import NameEntryNotFound
from asyncrl.observe import observer

WATCH_S = 0.5
"""Longest time in seconds that a thread waits for a guest's turn or memory, and by which it outlives a stop."""


class Guest:
    """A guest's turns on its device, by what the trainer and the GserverManager publish.

    Args:
        resolver: name resolution of the run.
        index: index of the server.
        name: name of this process.
        lease_s: time in seconds after which an entry of a dead process is gone.
    """

    def __init__(self, resolver: NameResolver, index: int, name: str, lease_s: float) -> None:
        self._resolver, self._name, self._lease_s = resolver, name, lease_s
        self._loading, self._memory = names.loading_guest_key(index), names.guest_memory_key(index)

    async def await_turn(self, waiting: Callable[[], None]) -> None:
        """Wait until the guest may take its device, and record that it does; call `waiting` from time to time."""
        last = None
        while True:
            self._resolver.add(self._loading, self._name, lease_s=self._lease_s, replace=True)
            try:
                last = self._resolver.get(names.TRAINER_TURN_KEY)
                if not names.TrainerTurn.decode(last).training:
                    return
            except NameEntryNotFound:
                pass  # the ranks load their models
            self._resolver.withdraw(self._loading)
            observer.stage("waits for its turn on the device")
            while True:
                waiting()
                with contextlib.suppress(NameResolveTimeout):
                    await asyncio.to_thread(self._resolver.watch, names.TRAINER_TURN_KEY, WATCH_S, last)
                    break

    def loaded(self) -> None:
        """Record that the engine holds the device now."""
        self._resolver.withdraw(self._loading)

    async def follow_rests(self, url: str) -> Never:
        """Set this process's stage until cancelled: the guest at `url` rests while its memory is released, and
        otherwise serves. The GserverManager records both (`names.GuestMemory`).
        """
        released, last = names.GuestMemory(url, released=True).encode(), None
        while True:
            with contextlib.suppress(NameResolveTimeout):
                last = await asyncio.to_thread(self._resolver.watch, self._memory, WATCH_S, last)
                observer.stage(observer.RESTS if last == released else observer.SERVES)
