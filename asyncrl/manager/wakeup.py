"""Waiting for a change inside one event loop, with a time limit."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes whoever waits. Notifying costs nothing while nobody does."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake everyone who waits now."""
        for waiter in list(self._waiters):
            if not waiter.done():
                waiter.set_result(None)

    def next(self) -> asyncio.Future[None]:
        """A future that the next `notify` completes; cancel it when it is not wanted any more."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)
        return waiter

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify`; False where none came within `timeout_s` seconds."""
        waiter = self.next()
        done, _ = await asyncio.wait({waiter}, timeout=max(0.0, timeout_s))
        waiter.cancel()
        return bool(done)
