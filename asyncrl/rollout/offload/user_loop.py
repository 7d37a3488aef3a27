"""The event loop on which users' `async def` code runs, in a thread of its own.

What blocks there delays other code of the user's, and nothing of the worker's.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncrl.rollout.offload.threads import UnusualExit

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


async def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, run on `loop`, whichever loop the caller is on; to cancel the caller cancels it."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


class UserLoop:
    """See the module's docstring. It starts with the first call and ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="users-event-loop", daemon=True)

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`.

        Raises:
            UnusualExit: it raised SystemExit or KeyboardInterrupt.
            Exception: whatever else it raised.
        """
        if not self._thread.is_alive():
            self._thread.start()
        return await run_on(self._loop, _carried(work))

    def ping(self, answered: threading.Event) -> None:
        """Have the loop set `answered` in its next turn."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(answered.set)
        else:
            answered.set()

    def stack(self) -> str:
        """Where the loop's thread is, the innermost call last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-4:])

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException as error:  # a task of the user's raised SystemExit: the others go on
                _log.error("a task of the user's ended with %s; the others go on", type(error).__name__)


async def _carried(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise UnusualExit(f"raised {type(error).__name__}") from error
