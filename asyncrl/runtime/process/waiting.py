"""Waits that a stop request or a limit ends; and a stop in time, or a log of what the process waits for.

Every process has `LEAVE_LIMIT_S` to stop, except the leader of a run, which saves a checkpoint first. After that
`explain_delay` logs the position of each thread and coroutine, just before the launcher kills the process.

A training rank needs more. Python runs a signal handler in the main thread, between two bytecode instructions. So no
handler runs while that thread waits in native code, for a peer in a collective or for a GPU. The C-level handler does
run, and writes the signal's number into a pipe (`signal.set_wakeup_fd`), which a thread of `stop_listener` reads.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrl.comm.name_resolve import NameResolver, NameResolveTimeout
from asyncrl.comm.waits import LOOK_S, STOP_S, running_wait
from asyncrl.runtime.settings import EXIT_OK
from asyncrl.runtime.supervisor import STOP_SIGNAL

_T = TypeVar("_T")
LEAVE_LIMIT_S = STOP_S - LOOK_S
"""Just below the time after which the launcher kills a process, which then could not log its position any more."""
_MOST_COROUTINES = 20
_log = logging.getLogger(__name__)


class StopRequested(Exception):  # it ends a wait; nothing went wrong
    """A stop request ended a wait."""


async def or_stop(waiting: Awaitable[_T], stop: asyncio.Event, limit_s: float) -> _T:
    """Await `waiting`. If it has ended, its result counts, even if a stop was requested too; otherwise it is cancelled.

    Raises:
        StopRequested: `stop` was set first.
        TimeoutError: neither happened within `limit_s` seconds of this process's running time
            (`asyncrl.comm.waits`).
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


def explain_delay(stopped: threading.Event, limit_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
    """Start a thread that logs all stacks, and coroutines of `loop`, if `stopped` is not set within `limit_s`."""

    def watch() -> None:
        if stopped.wait(limit_s):
            return
        _log.warning("asked to stop %g s ago, this process waits for:\n%s", limit_s, _coroutines(loop))
        faulthandler.dump_traceback()

    threading.Thread(target=watch, name="stop-watch", daemon=True).start()


def _coroutines(loop: asyncio.AbstractEventLoop | None) -> str:
    tasks = [] if loop is None else list(asyncio.all_tasks(loop))
    lines = [f"    {task.get_name()}: {_path(task)}" for task in tasks[:_MOST_COROUTINES]]
    if left := tasks[_MOST_COROUTINES:]:
        lines.append(f"    and {len(left)} coroutines more")
    return "\n".join(lines or ["    no coroutine"])


def _path(task: asyncio.Task[Any]) -> str:
    """Return the functions on a task's stack, the outermost first, each with its file and line."""
    inner: object = task.get_coro()
    found = []
    while inspect.iscoroutine(inner):
        if (frame := inner.cr_frame) is not None:
            code = frame.f_code
            found.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        inner = inner.cr_await
    return " > ".join(found)


@contextmanager
def stop_listener(act: Callable[[], None], limit_s: float = LEAVE_LIMIT_S) -> Iterator[None]:
    """Call `act` in a separate thread at the first `STOP_SIGNAL` within this block, in addition to the signal's
    handler.

    If the block has not ended `limit_s` seconds after that, the process exits at once, with the stacks of all threads
    in its log. Enter the block once, in the main thread, after installing a Python handler for the signal.
    """
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    left = threading.Event()

    def listen() -> None:
        while STOP_SIGNAL not in os.read(heard, 64):
            pass
        act()
        if not left.wait(limit_s):
            _log.warning("asked to stop, this process ends now, %g s later, in the middle of what follows", limit_s)
            faulthandler.dump_traceback()
            os._exit(EXIT_OK)

    threading.Thread(target=listen, name="stop-listener", daemon=True).start()
    try:
        yield
    finally:
        left.set()
