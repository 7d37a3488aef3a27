"""Threads for users' code: its event loop, and threads for plain functions, at most so many at a time.

An abandoned call goes on in its thread, because Python cannot end one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from asyncrl.api.reward import RunIn
from asyncrl.comm.waits import RunningTimeout, run_on
from asyncrl.config.plugin_code.threads import DaemonThreads, UnusualExit
from asyncrl.observe import observer
from asyncrl.rollout.user_code_pool.call_records import TOO_SLOW, Activity, Code, UserCodeError, checked, raised, timed

MAX_ABANDONED = 64
"""Limit on abandoned calls of one piece of code that still run in threads; it is not called until one of them ends."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class UserThreads:
    """Runs users' code in threads, and on the users' event loop. Made in the worker's own loop.

    Args:
        number: calls of plain functions that run at a time.
        track: tracks the call of a block, by the code's label and its activity.

    Attributes:
        loop: the users' event loop.
    """

    def __init__(self, number: int, track: Callable[[str, Activity], AbstractContextManager[None]]) -> None:
        self._home, self._track = asyncio.get_running_loop(), track
        self.loop = UserLoop()
        self._threads = DaemonThreads()
        self._free_threads = asyncio.Semaphore(number)
        self._abandoned: Counter[str] = Counter()
        """By label, the calls that were abandoned and still run in threads."""

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run `function` in a separate thread, without a time limit or a label, and return its result."""
        return await asyncio.wrap_future(self._threads.run(function))

    async def call(self, code: Code, work: Callable[[], Any]) -> Any:
        """Run `work` in a thread, once one is free, and return its result. For the worker's own loop."""
        if self._abandoned[code.label] >= MAX_ABANDONED:
            raise UserCodeError(
                code.label,
                f"is not called: {MAX_ABANDONED} calls of it never returned and each holds a thread; have it return, "
                "or run it in a process (run_in: process), which can be killed",
                how="hangs in too many threads",
            )
        with timed(Activity.thread_wait):
            await self._free_threads.acquire()
        try:
            with self._track(code.label, code.activity):
                running = self._threads.run(partial(checked, code, work))
                try:
                    async with _limited(code, "its thread continues", still_runs=True):
                        return await asyncio.wrap_future(running)
                finally:
                    if not running.done():
                        self._abandoned[code.label] += 1
                        running.add_done_callback(partial(self._came_back, code.label))
        finally:
            self._free_threads.release()

    def _came_back(self, label: str, _: object) -> None:
        def forget() -> None:
            self._abandoned[label] -= 1

        with contextlib.suppress(RuntimeError):  # the worker has ended meanwhile
            self._home.call_soon_threadsafe(forget)

    async def call_async(self, code: Code, function: Callable[[], Awaitable[Any]]) -> Any:
        """Run `function` on the worker's loop if `code` may run there, else on the users', and return its result."""

        async def work() -> Any:
            try:
                return await function()
            except UserCodeError:  # of other code that it called
                raise
            except Exception as error:
                raise raised(code, error) from error

        run = partial(run_on, self._home) if code.run_in == RunIn.loop else self.loop.run
        with self._track(code.label, code.activity):
            try:
                async with _limited(code, "it was cancelled"):
                    return await run(work())
            except UnusualExit as error:
                raise UserCodeError(code.label, str(error), how=str(error)) from error


class UserLoop:
    """An event loop in a daemon thread, which starts with the first call and ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="users-event-loop", daemon=True)

    async def run(self, work: Awaitable[_T]) -> _T:
        """Run `work` and return its result.

        Raises:
            UnusualExit: it raised SystemExit or KeyboardInterrupt.
            Exception: any other error that it raised.
        """
        if not self._thread.is_alive():
            self._thread.start()
        return await run_on(self._loop, _carried(work))

    def ping(self) -> threading.Event:
        """Return an event that the loop sets in its next iteration."""
        answered = threading.Event()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(answered.set)
        else:
            answered.set()
        return answered

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


async def _carried(work: Awaitable[_T]) -> _T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise UnusualExit(f"raised {type(error).__name__}") from error


@contextlib.asynccontextmanager
async def _limited(code: Code, fate: str, *, still_runs: bool = False) -> AsyncIterator[None]:
    """Limit this block to `code.timeout_s`; `fate` says what becomes of a call that takes longer."""
    limit = RunningTimeout(code.timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        what = f"did not return within {code.timeout_s:g} s; {fate}"
        raise UserCodeError(code.label, what, how=TOO_SLOW, still_runs=still_runs) from error
