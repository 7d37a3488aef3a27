"""Outages of a back end: etcd restarts or elects a leader, a file system is full or has a stale handle.

`Outages` limits the retries of failed calls. Kinds of calls are separate because a full disk can be read but not
written. An outage is one line in the log, for all calls and retries together.

An outage must not look as if all processes had died. While a back end is away no lease can be renewed. When it is back
(etcd was stopped, or a link was cut), the leases have run out: every entry is removed, and put back by its owner a
moment later. So for `GRACE_S` after a sign of trouble (a call failed or took long, or this process stood still), a
`Subtree` holds removals back for `GRACE_S`. Without trouble a removal takes effect at once.

    t=0 s     etcd stops answering, and the calls of this process fail
    t=30 s    etcd answers again, leases have run out      replace({}): "a" and "b" are held back until 38 s
    t=31 s    the owner of "a" has put it back             replace({"a": ...}): the reader never missed it
    t=38 s    no owner has put "b" back                    it is gone
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from asyncrl.comm.waits.backoff import Backoff

_log = logging.getLogger(__name__)

GRACE_S = 8.0
"""By which removals are delayed in an outage: longer than an owner takes to put its entry back. That is a call that
hangs until its limit (4 s), a retried renewal (0.5 s), a new connection (1 s).
"""
RECENT_S = 30.0
"""After which a failure that no call followed says nothing about the present."""
SLOW_CALL_S = 0.5
"""After which a call is a sign of trouble."""
BACKOFF = Backoff(0.05, 1.0)
"""Delays between a failed call and its retry."""


class NameResolveError(Exception):
    """Base of the errors of name resolution. Raised itself if a back end refuses access or is closed, or an entry is
    damaged.
    """


class NameResolveUnavailable(NameResolveError):
    """The back end does not answer, or fails (connection, stale handle, full disk). A later call may work."""


class Outages:
    """The outages that one resolver has seen. Any thread may call it.

    Args:
        root: root of the resolver, for messages.
        limit_s: seconds for which calls of a kind may fail.
        clock: monotonic time in seconds.
    """

    def __init__(self, root: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self.limit_s, self._clock = root, limit_s, clock
        self._failing_since: dict[str, float] = {}  # by kind of call
        self._failed_at = 0.0
        self._trouble_until = float("-inf")
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}  # the begin of each running call
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
        self.trouble()
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

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Record trouble if the block, a call to the back end, fails or is slow."""
        number = next(self._numbers)
        began = self._running[number] = self._clock()
        failed = True
        try:
            yield
            failed = False
        finally:
            del self._running[number]
            if failed or self._clock() > began + SLOW_CALL_S:
                self.trouble()

    def trouble(self) -> None:
        """Record that leases may have run out while this process did not call."""
        self._trouble_until = self._clock() + GRACE_S

    @property
    def in_trouble(self) -> bool:
        """True if the back end hangs, or did until a moment ago. Owners that could not renew their leases have then
        lost them.

        A lease expires if its owner could not renew it for two thirds of its length. Every process that has a lease
        renews it each third. So before any lease expires, a call of this process has been slow or has failed, or this
        process was paused itself.
        """
        now = self._clock()
        return now < self._trouble_until or any(now > began + SLOW_CALL_S for began in list(self._running.values()))


class Subtree:
    """The entries at or below a root, which the resolver keeps up to date. Reading makes no call. Any thread may call
    it.

    Args:
        root: root of the entries.
        clock: monotonic time in seconds.
    """

    def __init__(self, root: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.changes = 0
        """Number of changes, and of failures to read them; see `await_change`."""
        self.is_followed, self.waiting = False, 0
        """For the resolver: who needs it, in `follow` and in `watch`."""
        self._clock = clock
        self._present: dict[str, str] | None = None  # None: not read yet
        self._leaving: dict[str, tuple[str, float]] = {}  # entries held back: value, and end of the delay
        self._refused: NameResolveError | None = None
        self._changed = threading.Condition()

    @property
    def is_read(self) -> bool:
        """True once `replace` was called."""
        return self._present is not None

    def entries(self) -> dict[str, str]:
        """Return the living entries by full name, sorted; during an outage the last known ones.

        Raises:
            NameResolveError: the back end refuses access.
        """
        with self._changed:
            if self._refused is not None:
                raise self._refused
            now = self._clock()
            self._leaving = {name: left for name, left in self._leaving.items() if now < left[1]}
            held_back = {name: value for name, (value, _) in self._leaving.items()}
            return dict(sorted((held_back | (self._present or {})).items()))

    def get(self, name: str) -> str | None:
        """Return the value under `name`; None without such an entry."""
        return self.entries().get(name)

    def await_change(self, seen: int, timeout_s: float) -> None:
        """Return once `changes` differs from `seen`, after `timeout_s` seconds at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: self.changes != seen, timeout_s)

    def replace(self, found: Mapping[str, str], *, in_trouble: bool = False, first: bool = False) -> None:
        """Store all entries. `in_trouble`: hold removals back. `first`: only if none were stored before."""
        with self._changed:
            before = self._present or {}
            if found == self._present or (first and self.is_read):
                return
            if in_trouble:
                until = self._clock() + GRACE_S
                self._leaving |= {name: (before[name], until) for name in before.keys() - found.keys()}
            self._leaving = {name: left for name, left in self._leaving.items() if name not in found}
            self._present = dict(found)
            self._wake()

    def away(self) -> None:
        """Record that the back end is away: the owners of what is held back need as long again."""
        with self._changed:
            until = self._clock() + GRACE_S
            self._leaving = {name: (value, until) for name, (value, _) in self._leaving.items()}
            self._wake()

    def refuse(self, error: NameResolveError) -> None:
        """Raise `error` from all reads: the back end refuses access for good."""
        with self._changed:
            self._refused = error
            self._wake()

    def wake(self) -> None:
        """End all waits: the resolver is closed."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self.changes += 1
        self._changed.notify_all()
