"""Daemon threads for plain functions, one per running call and never waited for at exit, and an event loop for others.

`concurrent.futures` joins its threads at exit, so a hanging function would keep the worker from ending. Hanging threads
would use up its pool for good. Here the caller limits the calls, and a thread whose call was abandoned becomes idle
again if the call ever ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncrl.observe import observer

_T = TypeVar("_T")
_Job = tuple[Callable[[], Any], "Future[Any]", contextvars.Context]


class UnusualExit(Exception):
    """The function raised an exception that an event loop cannot pass on: SystemExit, KeyboardInterrupt,
    StopIteration.
    """


class DaemonThreads:
    """Runs functions, each in a thread; thread-safe. `started` counts the threads made so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self.started = 0

    def run(self, function: Callable[[], _T]) -> Future[_T]:
        """Begin `function` in a thread, within the caller's context variables.

        An exception that an event loop cannot carry becomes the cause of an `UnusualExit`.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
            if jobs is None:
                self.started += 1
        if jobs is None:
            jobs = queue.SimpleQueue()
            name = f"user-code-{self.started}"
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()
        jobs.put((function, future, contextvars.copy_context()))
        return future

    def _work(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            function, future, context = jobs.get()
            value, error = _outcome(function, context)
            with self._lock:
                self._idle.append(jobs)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            del function, future, context, value, error  # an idle thread must not keep its last call's objects alive


def _outcome(function: Callable[[], Any], context: contextvars.Context) -> tuple[Any, BaseException | None]:
    try:
        return context.run(function), None
    except (StopIteration, StopAsyncIteration) as error:
        unusual = UnusualExit(f"raised {type(error).__name__}")
    except Exception as error:
        return None, error
    except BaseException as error:
        unusual = UnusualExit(f"raised {type(error).__name__}")
        unusual.__cause__ = error
    return None, unusual


_log = logging.getLogger(__name__)


async def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` on `loop` from any loop and return its result; cancelling the caller cancels `work`."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class UserLoop:
    """An event loop in a daemon thread, which starts with the first call and ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="users-event-loop", daemon=True)

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` and return its result.

        Raises:
            UnusualExit: it raised SystemExit or KeyboardInterrupt.
            Exception: any other error that it raised.
        """
        if not self._thread.is_alive():
            self._thread.start()
        return await run_on(self._loop, _carried(work))

    def ping(self, answered: threading.Event) -> None:
        """Make the loop set `answered` in its next iteration."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(answered.set)
        else:
            answered.set()

    def stack(self) -> str:
        """Return the stack of the loop's thread, the innermost call last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-4:])

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        observer.watch(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException as error:  # a user's task raised SystemExit; the other tasks continue
                _log.error("a user's task ended with %s; the others continue", type(error).__name__)


async def _carried(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise UnusualExit(f"raised {type(error).__name__}") from error
