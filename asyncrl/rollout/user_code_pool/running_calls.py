"""Running calls of users' code: their time, and log lines that name code that is slow or blocks an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator

from asyncrl.rollout.user_code_pool.timing import Activity, timed
from asyncrl.rollout.user_code_pool.user_loop import UserLoop

WATCH_EVERY_S = 0.5
HELD_S = 1.0
"""Seconds without a turn after which an event loop counts as blocked, and the blocking code is named."""
QUIET_S = 10.0
"""Least seconds between two log lines about the same code: slow code is mostly slow a thousand times."""

_log = logging.getLogger(__name__)


class RunningCalls:
    """Tracks calls. Between `start` and `stop` it also watches the worker's event loop and the users'.

    Args:
        users: the users' event loop.
        slow_s: a call that takes this many seconds or more is logged.
    """

    def __init__(self, users: UserLoop, slow_s: float) -> None:
        self._users, self._slow = users, SlowCalls(slow_s)
        self._labels: dict[int, str] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        """Watch the running event loop from now on."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    @contextlib.contextmanager
    def track(self, label: str, activity: Activity, *, holds_loop: bool = False) -> Iterator[None]:
        """Track the call of this block: time it, name it if it is slow, and list it as running.

        Args:
            label: name of the code.
            activity: activity that its time counts as.
            holds_loop: the call runs on an event loop, and blocks it until it returns.
        """
        number, begun = next(self._numbers), time.monotonic()
        self._labels[number] = label
        try:
            with timed(activity):
                yield
            if holds_loop and (held_s := time.monotonic() - begun) > HELD_S:
                _log.warning(
                    "%s held an event loop for %.2g s; run it in a thread or a process (run_in)", label, held_s
                )
        finally:
            del self._labels[number]
            now = time.monotonic()
            if line := self._slow.note(label, now - begun, now):
                _log.warning("%s", line)

    async def _watch(self) -> None:
        """Log the code that blocks this loop or the users' loop."""
        users_told = False
        while True:
            begun, answered = time.monotonic(), threading.Event()
            self._users.ping(answered)
            await asyncio.sleep(WATCH_EVERY_S)
            held_s = time.monotonic() - begun - WATCH_EVERY_S
            if held_s > HELD_S and (running := sorted(set(list(self._labels.values())))):
                _log.warning(
                    "the worker did not get a turn for %.2g s while these ran: %s; what computes in Python for long "
                    "holds the interpreter's lock: run it in a process (run_in: process)",
                    held_s,
                    ", ".join(running),
                )
            if not answered.is_set() and held_s < HELD_S:
                if not users_told:
                    _log.warning(
                        "asynchronous code of the user's has held its event loop for %.2g s; write what blocks as "
                        "plain `def`, which runs in a thread; it is at\n%s",
                        WATCH_EVERY_S,
                        self._users.stack(),
                    )
                users_told = True
            else:
                users_told = False


class SlowCalls:
    """Reports calls that took `limit_s` or longer, at most once in `QUIET_S` per piece of code."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def note(self, label: str, seconds: float, now: float) -> str | None:
        """Return the log line about a call that took `seconds` and ended at `now`; None if it needs none."""
        if seconds < self._limit_s:
            return None
        if now - self._said_at.get(label, -QUIET_S) < QUIET_S:
            self._unsaid[label] += 1
            return None
        self._said_at[label] = now
        more = self._unsaid.pop(label, 0)
        before = f", and {more} more of its calls were slow since the last such line" if more else ""
        return f"{label} took {seconds:.3g} s{before}"
