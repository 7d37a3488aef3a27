"""Retry calls while a back end is away: etcd restarts or elects a leader, a file system is full or has a stale handle.

A failed call is retried with growing delays, until it works or calls of its kind have failed for `limit_s` without a
success. Kinds are separate because a full disk can be read but not written. An outage is one line in the log, for all
calls and retries together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncrl.comm.name_resolve.errors import NameResolveUnavailable
from asyncrl.comm.waits.backoff import Backoff

_log = logging.getLogger(__name__)

RECENT_S = 30.0
"""Time after which a failure that no call followed says nothing about the present."""
BACKOFF = Backoff(0.05, 1.0)
"""Delays between a failed call and its retry."""


class Patience:
    """The outages of one resolver. Any thread may call it.

    Args:
        root: root of the resolver, for messages.
        limit_s: seconds for which calls of a kind may fail.
        clock: monotonic time in seconds.
    """

    def __init__(self, root: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self.limit_s, self._clock = root, limit_s, clock
        self._failing_since: dict[str, float] = {}
        self._failed_at = 0.0
        self._lock = threading.Lock()

    @property
    def outage_s(self) -> float:
        """Seconds for which calls have failed; 0 while all work."""
        now = self._clock()
        with self._lock:
            since = min(self._failing_since.values(), default=now)
            return now - since if now - self._failed_at < RECENT_S else 0.0

    def worked(self, kind: str) -> None:
        """Record that a call of `kind` worked: its outage is over."""
        if self._failing_since:
            with self._lock:
                self._failing_since.pop(kind, None)

    def failed(self, kind: str, error: Exception, failures: int) -> float:
        """Record the `failures`-th failure in a row of a call of `kind`; return the seconds to wait before the retry.

        Raises:
            NameResolveUnavailable: calls of this kind have failed for too long.
        """
        now = self._clock()
        with self._lock:
            begins = not self._failing_since
            since, self._failed_at = self._failing_since.setdefault(kind, now), now
        if now - since >= self.limit_s:
            raise NameResolveUnavailable(f"{error} (name resolution has failed for {now - since:.0f} s)") from error
        if begins:
            _log.warning(
                "name resolution under %r fails, calls are retried for up to %g s: %s",
                self._root, self.limit_s, error,
            )  # fmt: skip
        return BACKOFF.delay(failures)
