"""Waits that a stop request or a limit ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from asyncrl.comm.name_resolve import NameResolver, NameResolveTimeout
from asyncrl.comm.waits.limits import LOOK_S
from asyncrl.comm.waits.running_time import running_wait

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
            return await asyncio.to_thread(resolver.wait, key, LOOK_S)
        except NameResolveTimeout:
            look()
    raise StopRequested
