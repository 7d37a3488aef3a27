"""The part of a server on the trainer's devices: it loads its model in its turn, and shows whether it sleeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Never

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryNotFound, NameResolver, NameResolveTimeout
from asyncrl.comm.waits import LOOK_S
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity


class ColocatedServer:
    """The turns of a colocated server on a device that the trainer uses too.

    They follow entries that the trainer and the GserverManager publish.

    Args:
        resolver: name resolution of the run.
        index: index of the server.
        name: name of this process.
        lease_s: time in seconds after which an entry of a dead process is gone.
    """

    def __init__(self, resolver: NameResolver, index: int, name: str, lease_s: float) -> None:
        self._resolver, self._name, self._lease_s = resolver, name, lease_s
        self._loading, self._memory = f"{names.LOADING_COLOCATED}/{index}", names.server_memory_key(index)

    async def await_turn(self, waiting: Callable[[], None]) -> None:
        """Wait until the colocated server may take its device, and record that it does; call `waiting` from time to
        time.
        """
        last = None
        while True:
            self._resolver.add(self._loading, self._name, lease_s=self._lease_s, replace=True)
            try:
                last = self._resolver.get(names.TRAINER_TURN_KEY)
                if not names.TrainerTurn.decode(last).training:
                    return
            except NameEntryNotFound:
                pass  # the ranks load their models
            self._resolver.delete(self._loading, own=True)
            observer.stage("waits for the trainer to free the device's memory", Activity.blocked)
            while True:
                waiting()
                with contextlib.suppress(NameResolveTimeout):
                    await asyncio.to_thread(self._resolver.watch, names.TRAINER_TURN_KEY, LOOK_S, last)
                    break

    def loaded(self) -> None:
        """Record that the engine holds the device now."""
        self._resolver.delete(self._loading, own=True)

    async def follow_sleep(self, url: str) -> Never:
        """Set this process's stage until cancelled: the colocated server at `url` sleeps while its memory is released,
        and otherwise serves. The GserverManager records both (`names.ServerMemory`).
        """
        released, last = names.ServerMemory(url, released=True).encode(), None
        while True:
            with contextlib.suppress(NameResolveTimeout):
                last = await asyncio.to_thread(self._resolver.watch, self._memory, LOOK_S, last)
                observer.stage(observer.SLEEPS if last == released else observer.SERVES, Activity.serves)
