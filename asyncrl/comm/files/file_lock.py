"""An exclusive lock on an open file or folder. The kernel releases it when its holder ends."""

from __future__ import annotations

import fcntl
import time

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
"""Delays in seconds between two attempts, since flock has no time limit."""


def take_lock(descriptor: int, limit_s: float = 0.0) -> bool:
    """Try for `limit_s` seconds to lock `descriptor`; return True if this process has the lock now.

    Raises:
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_LOOK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        else:
            return True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
