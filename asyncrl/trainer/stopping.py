"""A stop that is heard at once, wherever the main thread is, and comes to an end.

Python runs the handler of a signal in the main thread, between two of its instructions: not while that waits in native
code, for a peer in a collective or for a GPU. The kernel's own handler does run, and writes the signal's number into a
pipe (`signal.set_wakeup_fd`), which a thread reads.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.runtime.exit_codes import EXIT_OK

LEAVE_LIMIT_S = 2.5
"""Just below what the launcher waits before it kills a process, which could not say any more where it was."""
_log = logging.getLogger(__name__)


@contextmanager
def heard_at_once(act: Callable[[], None], limit_s: float = LEAVE_LIMIT_S) -> Iterator[None]:
    """Within it `act` is called, by a thread of its own, when SIGTERM comes first, beside the handler that it has.

    Where it is not left within `limit_s` seconds after that, the process ends in the middle of what it does, with the
    stacks of all threads in its log. Enter it in the main thread, once; SIGTERM needs a handler in Python by the time
    it comes.
    """
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    left = threading.Event()

    def listen() -> None:
        while signal.SIGTERM not in os.read(heard, 64):
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
