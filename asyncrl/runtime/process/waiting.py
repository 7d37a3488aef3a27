"""Waits that a stop request, a limit or a notification ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.name_resolve.errors import NameResolveTimeout
from asyncrl.comm.waits.running_time import running_wait

_NAME_WAIT_S = 0.5  # longest wait for a name that a stop request cannot interrupt
_T = TypeVar("_T")


class StopRequested(Exception):  # it ends a wait; nothing went wrong
    """A stop request ended a wait."""


async def or_stop(waiting: Awaitable[_T], stop: asyncio.Event, limit_s: float) -> _T:
    """Await `waiting`. If it has ended, its result counts, even if a stop was requested too; otherwise it is cancelled.

    Raises:
        StopRequested: `stop` was set first.
        TimeoutError: neither happened within `limit_s` seconds of this process's running time
            (`asyncrl.comm.waits.running_time`).
    """
    task, stopping = asyncio.ensure_future(waiting), asyncio.ensure_future(stop.wait())
    try:
        await running_wait(task, stopping, limit_s=limit_s)
        if task.done():
            return task.result()
        raise StopRequested if stopping.done() else TimeoutError
    finally:
        await cancel(task, stopping)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def await_name(resolver: NameResolver, key: str, look: Callable[[], None], stop: asyncio.Event) -> str:
    """Wait for a value under `key` and return it. `look` is called meanwhile, and may end the wait by raising.

    Raises:
        StopRequested: `stop` was set.
        Exception: what `look` raises.
    """
    while not stop.is_set():
        try:  # a thread cannot be interrupted: short waits, so that a stop request need not outwait a long one
            return await asyncio.to_thread(resolver.wait, key, _NAME_WAIT_S)
        except NameResolveTimeout:
            look()
    raise StopRequested


class Notifier:
    """Wakes all tasks that wait, in order of arrival. Like `asyncio.Condition` without the lock."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[bool], None] = {}

    def notify(self) -> None:
        """Wake all that wait now."""
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
