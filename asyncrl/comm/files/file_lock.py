"""Locks on open files, which show that a process is alive. The kernel releases a lock when its holder ends.

A process id says nothing in another container, and a clock nothing on another host; a lock holds in both.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from pathlib import Path

from asyncrl.comm.waits.backoff import Backoff

_PAUSES = Backoff(0.002, 0.05)
"""Seconds between two attempts, since flock has no time limit."""


def take_lock(descriptor: int, limit_s: float = 0.0, *, shared: bool = False) -> bool:
    """Try for `limit_s` seconds to lock `descriptor`; return True if this process has the lock now.

    Args:
        shared: others may hold the lock too, if they share it.

    Raises:
        OSError: the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + limit_s
    attempts = itertools.count(1)
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        else:
            return True
        time.sleep(_PAUSES.delay(next(attempts)))


def is_held(file: Path) -> bool:
    """True if a process on any host, in any container, holds an exclusive lock on `file`; False if there is no file.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not take_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
