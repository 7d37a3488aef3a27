"""Stop in time; if a process does not, log what it waits for.

Every process has `LEAVE_LIMIT_S` to stop, except the leader of a run, which saves a checkpoint first. After that
`explain_delay` logs the position of each thread and coroutine, just before the launcher kills the process.

A training rank needs more. Python runs a signal handler in the main thread, between two bytecode instructions. So no
handler runs while that thread waits in native code, for a peer in a collective or for a GPU. The C-level handler does
run, and writes the signal's number into a pipe (`signal.set_wakeup_fd`), which a thread of `heard_at_once` reads.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncrl.comm.waits.limits import LOOK_S, STOP_S
from asyncrl.runtime.exit_codes import EXIT_OK
from asyncrl.runtime.supervisor import STOP_SIGNAL

LEAVE_LIMIT_S = STOP_S - LOOK_S
"""Just below the time after which the launcher kills a process, which then could not log its position any more."""
_MOST_COROUTINES = 20
_log = logging.getLogger(__name__)


def explain_delay(stopped: threading.Event, limit_s: float, loop: asyncio.AbstractEventLoop | None) -> None:
    """Start a thread that logs all stacks if the process has not stopped within `limit_s` seconds.

    Args:
        stopped: set when the process has nothing left to wait for.
        limit_s: seconds from now.
        loop: the coroutines of this event loop are shown too, `_MOST_COROUTINES` of them.
    """

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
def heard_at_once(act: Callable[[], None], limit_s: float = LEAVE_LIMIT_S) -> Iterator[None]:
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
