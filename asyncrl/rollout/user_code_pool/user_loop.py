"""An event loop for users' asynchronous functions, in a daemon thread."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncrl.config.plugin_code.daemon_threads import UnusualExit
from asyncrl.observe import observer

_T = TypeVar("_T")
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
