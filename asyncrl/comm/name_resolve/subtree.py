"""The entries below a root, kept in memory and up to date by the resolver.

A back end reports all entries that it finds (`replace`). Reading (`entries`) makes no call, so the number of look-ups
does not grow with the number of processes.

An outage must not look as if all processes had died. While a back end is away no lease can be renewed. When it is back
(etcd was stopped, or a link was cut), the leases have run out: every entry is removed, and put back by its owner a
moment later. So after a sign of trouble (`trouble`: a call failed, or took long), a removal takes effect `GRACE_S`
late, and not at all if the entry is back by then. Without trouble it takes effect at once.

    t=0 s     etcd stops answering
    t=15 s    the next read fails                          trouble(): removals until 23 s are held back
    t=30 s    etcd answers again, leases have run out      replace({}): "a" and "b" are held back until 38 s
    t=31 s    the owner of "a" has put it back             replace({"a": ...}): the reader never missed it
    t=38 s    no owner has put "b" back                    it is gone
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from asyncrl.comm.name_resolve.errors import NameResolveError

GRACE_S = 8.0
"""Delay of removals, in s; longer than an owner takes to put its entry back: a call that hangs until its limit (4 s), a
retried renewal (0.5 s), a new connection (1 s).
"""


class Subtree:
    """The entries at or below a root. Any thread may call it.

    Args:
        root: root of the entries.
        clock: monotonic time in seconds.
    """

    def __init__(self, root: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._clock = clock
        self._present: dict[str, str] = {}
        self._leaving: dict[str, tuple[str, float]] = {}  # entries held back: value, and end of the delay
        self._trouble_until = float("-inf")
        self._away = False
        self._refused: NameResolveError | None = None
        self._lock = threading.Lock()

    def entries(self) -> dict[str, str]:
        """Return the living entries by full name, sorted; during an outage the last known ones.

        Raises:
            NameResolveError: the back end refuses access.
        """
        with self._lock:
            if self._refused is not None:
                raise self._refused
            now = self._clock()
            self._leaving = {name: left for name, left in self._leaving.items() if now < left[1]}
            held_back = {name: value for name, (value, _) in self._leaving.items()}
            return dict(sorted((held_back | self._present).items()))

    def get(self, name: str) -> str | None:
        """Return the value under `name`; None without such an entry."""
        return self.entries().get(name)

    def replace(self, found: Mapping[str, str], *, in_trouble: bool = False) -> None:
        """Store all entries; the back end works. `in_trouble`: it may have failed until a moment ago."""
        with self._lock:
            now = self._clock()
            gone = self._present.keys() - found.keys()
            if self._away or (in_trouble and gone):
                self._away, self._trouble_until = False, now + GRACE_S
            if now < self._trouble_until:
                self._leaving |= {name: (self._present[name], self._trouble_until) for name in gone}
            self._present = dict(found)
            self._leaving = {name: left for name, left in self._leaving.items() if name not in found}

    def trouble(self) -> None:
        """Record that the back end is away, or was until now."""
        with self._lock:
            self._away, self._trouble_until = True, self._clock() + GRACE_S
            self._leaving = {name: (value, self._trouble_until) for name, (value, _) in self._leaving.items()}

    def refuse(self, error: NameResolveError) -> None:
        """Raise `error` from all reads: the back end refuses access for good."""
        with self._lock:
            self._refused = error
