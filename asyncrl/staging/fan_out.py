"""Decide which host fetches a folder from which other host, if hosts share no folder. No sockets, no clocks.

The publisher's host, the origin, has the published folder on its own disk. Every other host fetches it once, from any
host that already has it, and is then a source itself. A host sends to at most `UPLOADS` others at a time, so each round
multiplies the number of hosts that have the folder by `UPLOADS` + 1: h hosts take 1 + log3(h) rounds, and none sends
more than `UPLOADS` copies a round.

    round 1    0 ─▶ 1, 2                      3 hosts have the folder
    round 2    0 ─▶ 3, 4   1 ─▶ 5, 6   2 ─▶ 7, 8      9
    ...                                       512 hosts: 6 rounds

No host waits for a round to end: each sends as soon as it has the folder. Among the sources with a free slot, the one
with the fewest uploads is chosen, and the origin last.

A source that fails is not used for a while, longer each time, and its fetch is repeated from another source. A host
that cannot store the folder is asked again after a while. A new or restarted host has nothing.

The launch's folders come first, then only the newest version. A host may need only some of these, and is then a source
only of those. A running fetch is completed even if a newer version is published. Otherwise a host whose fetch takes
longer than a train step would never have a version. Other older versions are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from asyncrl.comm.waits import Backoff
from asyncrl.staging.client import LAUNCHER_HOST

UPLOADS = 2
"""Number of copies that a host sends at a time. A folder of 100 GB over 100 Gbit/s takes 8 s alone and 16 s together
with another one; with more at a time no host becomes a source sooner.
"""
ORIGIN = LAUNCHER_HOST
"""The host of the publisher."""
_BACKOFF = Backoff(0.5, 30.0)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Order: the host gets `folder` from `source`, or from its own disk if that is None."""

    host: int
    folder: str
    source: int | None


@dataclass(slots=True)
class _Host:
    """One host: it is asked again at `due`, and may be a source again at `trusted`, both in s."""

    has: set[str] = field(default_factory=set)
    fetch: Fetch | None = None
    sends: list[str] = field(default_factory=list)
    failures: int = 0
    due: float = 0.0
    distrust: int = 0
    trusted: float = 0.0


class FanOut:
    """Orders fetches. The caller reports events, then carries out the orders of `poll`. Times are in seconds of its
    clock.

    Args:
        needs: returns whether a host needs a folder; the origin must need all.
    """

    def __init__(self, needs: Callable[[int, str], bool] = lambda host, folder: True) -> None:
        self._needs = needs
        self._hosts: dict[int, _Host] = {}
        self._wanted: list[str] = []

    def want(self, *folders: str) -> None:
        """Bring these folders, and from now on no others, to every host that needs them, in this order."""
        self._wanted = list(folders)
        for host in self._hosts.values():
            host.has &= set(folders)

    def added(self, host: int) -> None:
        """Add a new or restarted host, which has nothing."""
        self.removed(host)
        self._hosts[host] = _Host()

    def removed(self, host: int) -> None:
        """Remove a host. Hosts that fetch from it will find out."""
        gone = self._hosts.pop(host, None)
        if gone is not None and gone.fetch is not None:
            self._end_upload(gone.fetch)

    def poll(self, now: float) -> list[Fetch]:
        """Return the fetches that start now."""
        orders = []
        for folder in self._wanted:
            sources = [
                (len(host.sends), number == ORIGIN, number)
                for number, host in self._hosts.items()
                if folder in host.has and len(host.sends) < UPLOADS and host.trusted <= now
            ]
            heapq.heapify(sources)
            for number, host in self._waiting(folder):
                if host.due > now:
                    continue
                if number == ORIGIN:
                    orders.append(self._begin(Fetch(number, folder, None)))
                elif sources:
                    sends, origin, source = heapq.heappop(sources)
                    orders.append(self._begin(Fetch(number, folder, source)))
                    if sends + 1 < UPLOADS:
                        heapq.heappush(sources, (sends + 1, origin, source))
        return orders

    def succeeded(self, order: Fetch) -> bool:
        """Record that the host has the folder; return True if the order was still wanted."""
        host = self._ordered(order)
        if host is None:
            return False
        host.fetch, host.failures = None, 0
        if order.folder in self._wanted:
            host.has.add(order.folder)
        if (source := self._end_upload(order)) is not None:
            source.distrust = 0
        return True

    def failed(self, order: Fetch, now: float, *, source_failed: bool) -> None:
        """Record that the fetch failed because of the source or because of the host itself."""
        host = self._ordered(order)
        if host is None:
            return
        host.fetch = None
        source = self._end_upload(order)
        if source_failed and source is not None:
            source.distrust += 1
            source.trusted = now + _BACKOFF.delay(source.distrust)
        elif not source_failed or order.source is None:
            host.failures += 1
            host.due = now + _BACKOFF.delay(host.failures)

    def next_due(self, now: float) -> float | None:
        """Return the time at which `poll` may next have something to do without an event."""
        waiting = [host for folder in self._wanted for _, host in self._waiting(folder)]
        if not waiting:
            return None
        times = [host.due for host in waiting] + [host.trusted for host in self._hosts.values()]
        return min((time for time in times if time > now), default=None)

    def sends(self, host: int) -> frozenset[str]:
        """Return the folders that other hosts fetch from this host now."""
        return frozenset(self._hosts[host].sends)

    def _waiting(self, folder: str) -> Iterator[tuple[int, _Host]]:
        """Yield the idle hosts whose first missing folder is `folder`."""
        before = self._wanted[: self._wanted.index(folder)]
        for number, host in self._hosts.items():
            if host.fetch is not None or folder in host.has or not self._needs(number, folder):
                continue
            if all(earlier in host.has or not self._needs(number, earlier) for earlier in before):
                yield number, host

    def _begin(self, order: Fetch) -> Fetch:
        self._hosts[order.host].fetch = order
        if order.source is not None:
            self._hosts[order.source].sends.append(order.folder)
        return order

    def _ordered(self, order: Fetch) -> _Host | None:
        """Return the host if `order` is its current order; None if it was restarted since."""
        host = self._hosts.get(order.host)
        return host if host is not None and host.fetch is order else None

    def _end_upload(self, order: Fetch) -> _Host | None:
        """Return the source after freeing it of this order; None if it was restarted since."""
        source = None if order.source is None else self._hosts.get(order.source)
        if source is None or order.folder not in source.sends:
            return None
        source.sends.remove(order.folder)
        return source
