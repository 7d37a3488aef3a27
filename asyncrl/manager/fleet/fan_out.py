"""Decide which host fetches a folder from which other host, if hosts share no folder. No sockets, no clocks.

The publisher's host, the origin, has what is published on its own disk. Every other host fetches it once, from any host
that has it already, and is then a source itself. A host sends to at most `UPLOADS` others at a time, so with each round
there are `UPLOADS` + 1 times as many that have it: h hosts take 1 + log3(h) rounds, and none sends more than
`UPLOADS` copies a round.

    round 1    0 ─▶ 1, 2                      3 hosts have it
    round 2    0 ─▶ 3, 4   1 ─▶ 5, 6   2 ─▶ 7, 8      9
    ...                                       512 hosts: 6 rounds

No host waits for a round to end: each sends as soon as it has the folder. Of the sources with a free place the one that
sends least is chosen, the origin last.

A source that fails is not used for a while, longer each time, and the host that asked it is sent to the next. A host
that cannot store what it is sent is asked again after a while. A host that is new or was restarted has nothing.

The launch's folders come first, then the newest version alone. A host may need only some of these, and is then a source
of those only. A fetch that runs when a newer version is published is finished: otherwise a host whose fetch takes
longer than a train step would never have a version. Other older versions are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from asyncrl.comm.backoff import Backoff
from asyncrl.weights.staging.messages import LAUNCHER_HOST

UPLOADS = 2
"""Number of copies that a host sends at a time. A folder of 100 GB over 100 Gbit/s takes 8 s alone and 16 s beside
another one; with more at a time no host becomes a source sooner.
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
    """One host. `due`: when it is asked again, `trusted`: when it may be a source again, both in s."""

    has: set[str] = field(default_factory=set)
    fetch: Fetch | None = None
    sends: list[str] = field(default_factory=list)
    failures: int = 0
    due: float = 0.0
    distrust: int = 0
    trusted: float = 0.0


class FanOut:
    """Orders fetches. The caller reports events, then does what `poll` orders; times are its clock's.

    Args:
        needs: whether a host needs a folder; the origin has to need all.
    """

    def __init__(self, needs: Callable[[int, str], bool] = lambda host, folder: True) -> None:
        self._needs = needs
        self._hosts: dict[int, _Host] = {}
        self._wanted: list[str] = []

    def want(self, *folders: str) -> None:
        """These are wanted on every host that needs them, in this order; others not any more."""
        self._wanted = list(folders)
        for host in self._hosts.values():
            host.has &= set(folders)

    def added(self, host: int) -> None:
        """The host is there, or began again, and has nothing."""
        self.removed(host)
        self._hosts[host] = _Host()

    def removed(self, host: int) -> None:
        """The host is gone. Who fetches from it finds that out."""
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
        """The host has the folder; whether the order was still wanted."""
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
        """The host could not have the folder: because of the source, or by itself."""
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
        """When `poll` may have something to do next even if nothing happens until then."""
        waiting = [host for folder in self._wanted for _, host in self._waiting(folder)]
        if not waiting:
            return None
        times = [host.due for host in waiting] + [host.trusted for host in self._hosts.values()]
        return min((time for time in times if time > now), default=None)

    def sends(self, host: int) -> frozenset[str]:
        """Return the folders that other hosts fetch from this host now."""
        return frozenset(self._hosts[host].sends)

    def _waiting(self, folder: str) -> Iterator[tuple[int, _Host]]:
        """The hosts of which `folder` is the first that they lack, and that fetch nothing."""
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
        """The host, if this is what it was ordered to do, and not another since it began again."""
        host = self._hosts.get(order.host)
        return host if host is not None and host.fetch is order else None

    def _end_upload(self, order: Fetch) -> _Host | None:
        """The source, which is free of this order now; None where it is another by now."""
        source = None if order.source is None else self._hosts.get(order.source)
        if source is None or order.folder not in source.sends:
            return None
        source.sends.remove(order.folder)
        return source
