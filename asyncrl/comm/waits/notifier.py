"""Wait for a change inside one event loop, with a time limit."""

from __future__ import annotations

import asyncio


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
        waiter.add_done_callback(lambda done: self._waiters.pop(done, None))
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
