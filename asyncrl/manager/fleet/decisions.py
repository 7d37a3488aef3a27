"""Decide for each generation server its next action on the way to the newest weights. No sockets, no clocks.

States of a server::

                     registered at the newest version (or none is published yet)
                                      │
             ┌──── newer target ── SERVING ◀── succeeded ──┐
             ▼   (update_mode=finish)   │ (the others)     │
         DRAINING ── nothing runs ──▶ UPDATING ────────────┘
                                        │ failed, or no sign of life within the limit
                                        ▼
        registered at another version ▶ QUARANTINED ── back-off over: update again, to the newest target

- Only SERVING servers get requests. Their versions may differ; the gate's served version is the least of them.
- Each server is updated independently. A server that fails or hangs is quarantined, and the others continue. Versions
  may be skipped.
- The limit of an update is on silence (`manager.update_timeout_s`): it begins again while the server's process computes
  or reads, or the trainer sends (`worked`). `LONGEST_UPDATES` limits bound the whole.
- After a failed update the server's weights are unknown: SGLang may have replaced them and still answer 400. So the
  server gets no request until a complete update has succeeded, whatever version it reports.
- At most `update_fraction` of all servers are out of service for an update at a time, at least one. The others keep
  serving the previous version, and the gate counts by that version until the last server is updated. A failed server
  serves nothing and does not count, so it delays no other.
- If hosts share no folder (`ServerTargets`), a server is updated to the newest version that its host has, once there is
  one.
- A server may find the files damaged before it changes its weights: the embedded engine verifies checksums as it reads.
  It then serves its old weights again, and gets the next published version. If it was in quarantine, its weights are
  unknown, and it stays there.
- A server whose log-probabilities differ from the trainer's after an update is updated again. If every server has
  differed `DISAGREEMENTS_ALLOWED` times in a row, no update can help: `never_agree` returns the reason, and the run
  ends.
- A server that fails its health check is quarantined too, and returns in the same way. Before the first published
  version it returns once it is healthy, with the initial model. A server that reports another version than that of its
  last update fails the check: it was restarted at the same address.
- A registration with a new address is a new process, which begins at the version of its registration. A server without
  a registration is removed at once.
- Running requests, by `update_mode`. `interrupt`: they are answered at once with the tokens so far; clients resubmit
  them. `retract`: they go back to the server's queue and are prefilled again under the new weights, without the
  clients. `in_place`: they are frozen, and continue with the keys and values of the old weights. `finish`: the server
  is drained first. If all servers could be drained, one continues to serve until another is back.
- Every update pauses the server, also if it is drained: requests that still arrive are held, and never run while
  weights are replaced. A quarantined server has unknown weights, so its requests are always interrupted.

Servers on the trainer's devices take turns with it, by two more states (`asyncrl.colocated`).

Every order carries its `attempt`; outcomes of cancelled attempts are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from asyncrl.comm.names import ServerMemory
from asyncrl.comm.waits import Backoff
from asyncrl.inference.client import MemoryTag, PauseMode
from asyncrl.manager.fleet.servers import (
    BeginUpdate,
    CancelUpdate,
    CheckHealth,
    ColocatedTurns,
    FleetServer,
    Order,
    ServerTargets,
    Sleep,
    host_of,
)
from asyncrl.manager.messages import ServerState
from asyncrl.manager.settings import UpdateMode

_PAUSES: dict[UpdateMode, PauseMode] = {
    UpdateMode.interrupt: PauseMode.abort,
    UpdateMode.retract: PauseMode.retract,
    UpdateMode.in_place: PauseMode.in_place,
    UpdateMode.finish: PauseMode.abort,  # requests that a drained server received all the same
}

BACKOFF = Backoff(0.5, 30.0)
"""Time in seconds that a server stays in quarantine; longer with each failure."""
DISAGREEMENTS_ALLOWED = 5
"""Number of updates of a server in a row after which its log-probabilities may differ from the trainer's. Then the run
ends.
"""
LONGEST_UPDATES = 15
"""Limits of silence after which an update has failed all the same: an endless loop works too."""
HEALTH_FAILURES_ALLOWED = 1
"""Failed health checks in a row that leave a server in service: a busy one may answer late."""
_UNDER_WAY = (ServerState.UPDATING, ServerState.RELEASING)


@dataclass(slots=True)
class _Leaving:
    """Number of servers that may stop serving for an update now."""

    quota: int
    serving: int
    others_return: bool
    spares_the_last: bool
    """The last serving server waits until another is back: draining takes long."""

    def take_one(self) -> bool:
        """Reserve a slot for a server that stops serving; return False if all are taken."""
        if self.quota <= 0 or (self.spares_the_last and self.serving == 1 and self.others_return):
            return False
        self.quota, self.serving, self.others_return = self.quota - 1, self.serving - 1, True
        return True


class FleetDecisions:
    """Decides for all servers. The caller reports events, then carries out the orders of `poll`.

    Times are in seconds of the caller's clock. Methods that report an outcome return False if it belongs to an attempt
    that is not wanted any more.

    Args:
        mode: what an update does to running requests.
        update_timeout_s: an update without a sign of life for so long has failed.
        update_fraction: share of the servers that may be out of service for an update at a time; above 0, at most 1.
        targets: weights that the servers are to have; None: from a folder that all hosts share.
        colocated: servers that take turns with the trainer; None in a run without such servers.
    """

    def __init__(
        self,
        mode: UpdateMode,
        update_timeout_s: float,
        update_fraction: float = 1.0,
        *,
        targets: ServerTargets | None = None,
        colocated: ColocatedTurns | None = None,
    ) -> None:
        self.targets = targets or ServerTargets()
        self.colocated = colocated or ColocatedTurns()
        self._mode = mode
        self._fraction = update_fraction
        self._timeout_s = update_timeout_s
        self._servers: dict[int, FleetServer] = {}
        self._attempts = 0
        self._cancelled: list[CancelUpdate] = []

    @property
    def servers(self) -> list[FleetServer]:
        """Every registered server, in the order of their indices."""
        return [self._servers[index] for index in sorted(self._servers)]

    @property
    def served_version(self) -> int | None:
        """The least version among the servers that get requests; None if there is no such server."""
        return min((record.version for record in self._serving() if record.version is not None), default=None)

    def versions_in_use(self) -> set[int]:
        """Versions that servers serve or update to; their weights may still be read."""
        goals = {record.goal.version for record in self.servers if record.goal is not None}
        return goals | {record.version for record in self.servers if record.version is not None}

    def read_on(self, host: str | None = None) -> set[int]:
        """Return versions that servers on this host read, or are about to read; without a host those on any host."""
        reading = [record for record in self._servers.values() if host in (None, host_of(record.url))]
        return self.targets.on_host(host) | {record.goal.version for record in reading if record.goal is not None}

    def register(self, index: int, url: str, version: int, now: float, *, memory: ServerMemory | None = None) -> bool:
        """Record that the server is registered at `url` with `version`. This replaces its earlier process.

        Args:
            memory: a colocated server's memory, as an earlier manager recorded it last.

        Returns:
            True if the server was not known yet.
        """
        known = self._servers.get(index)
        if known is not None and known.url == url:
            return False
        self.deregister(index)
        target = self.targets.wanted(index)
        current = target is None or version == target.version
        record = FleetServer(index, url, version, ServerState.SERVING if current else ServerState.QUARANTINED, due=now)
        if not current:
            record.reason = f"new at version {version}"
        if memory is not None and memory.url == url:
            record.state = ServerState.ASLEEP if memory.released else ServerState.QUARANTINED
            record.version, record.released = None, frozenset(MemoryTag)
        self._servers[index] = record
        return True

    def deregister(self, index: int) -> bool:
        """Record that the server's registration is gone; return True if it was known."""
        record = self._servers.pop(index, None)
        if record is None:
            return False
        if record.state in _UNDER_WAY:
            self._cancelled.append(CancelUpdate(index, record.attempt, "the server is gone"))
        return True

    def worked(self, index: int, now: float) -> None:
        """Record a sign of life of the server, or of the trainer that sends to it: the limit of its update begins
        again.
        """
        record = self._servers.get(index)
        if record is not None and record.state in _UNDER_WAY:
            record.due = min(now + self._timeout_s, record.began + LONGEST_UPDATES * self._timeout_s)

    def poll(self, now: float, running: Mapping[int, int]) -> list[Order]:
        """Return the orders that are due now.

        Args:
            running: by server, number of its requests; a missing server has none.
        """
        orders: list[Order] = [*self._cancelled]
        self._cancelled.clear()
        leaving = self._leaving()
        for record in self.servers:
            match record.state:
                case ServerState.UPDATING | ServerState.RELEASING if now >= record.due:
                    self._quarantine(record, self._silence(record, now), now)
                    orders.append(CancelUpdate(record.index, record.attempt, record.reason))
                case _ if self.colocated.must_sleep(record.index):
                    orders += self._sleep(record, now)
                case ServerState.ASLEEP if self.colocated.may_wake:
                    orders.append(self._begin(record, now))
                case ServerState.SERVING if self._outdated(record) and leaving.take_one():
                    if self._mode == UpdateMode.finish:
                        record.state = ServerState.DRAINING
                    else:
                        orders.append(self._begin(record, now))
                case ServerState.QUARANTINED if now >= record.due and not record.checking and not self._waits(record):
                    if self.targets.goal(record) is not None:
                        orders.append(self._begin(record, now))
                    else:
                        record.checking = True
                        orders.append(CheckHealth(record.index, record.url))
        for record in self.servers:
            if record.state is ServerState.DRAINING and not running.get(record.index):
                orders.append(self._begin(record, now))
        return orders

    def next_due(self) -> float | None:
        """Return the time of the next `poll` that is needed even without a report; None if none is needed."""
        timed = (*_UNDER_WAY, ServerState.QUARANTINED)
        records = [record for record in self._servers.values() if record.state in timed and not record.checking]
        return min((record.due for record in records if not self._waits(record)), default=None)

    def succeeded(self, server: int, attempt: int) -> bool:
        """Record that the update is done and checked."""
        record = self._attempted(server, attempt)
        if record is None or record.goal is None:
            return False
        record.version = record.goal.version
        record.state = ServerState.SERVING
        record.failures = record.disagreements = record.health_failures = 0
        record.goal = None
        record.reason = ""
        record.released = frozenset()
        return True

    def released(self, server: int, attempt: int) -> bool:
        """Record that the server has released its memory."""
        record = self._attempted(server, attempt)
        if record is None:
            return False
        record.state, record.reason, record.failures = ServerState.ASLEEP, "", 0
        return True

    def resumed(self, server: int, attempt: int, tags: Collection[MemoryTag]) -> None:
        """Record that the server has memory of these kinds again."""
        if (record := self._attempted(server, attempt)) is not None:
            record.released -= frozenset(tags)

    def failed(self, server: int, attempt: int, reason: str, now: float, *, disagrees: bool = False) -> bool:
        """Record that the update, check or release failed.

        Args:
            disagrees: the server's log-probabilities differ from the trainer's.
        """
        record = self._attempted(server, attempt)
        if record is None:
            return False
        record.disagreements += disagrees
        self._quarantine(record, reason, now)
        return True

    def never_agree(self) -> str:
        """Return the reason why no update makes a server agree with the trainer; empty if an update may, or without
        servers.
        """
        records = self.servers
        if not records or min(record.disagreements for record in records) < DISAGREEMENTS_ALLOWED:
            return ""
        return f"{records[0].reason}. So it was after {records[0].disagreements} updates in a row, and no server agrees"

    def refused(self, server: int, attempt: int, reason: str, now: float) -> bool:
        """Record that the server refused damaged files and keeps its weights; return True if it serves those again."""
        record = self._attempted(server, attempt)
        if record is None or record.goal is None:
            return False
        record.damaged = record.goal.version
        if record.had is None:
            self._quarantine(record, reason, now)
            return False
        record.version = record.had
        record.state = ServerState.SERVING
        record.failures = record.health_failures = 0
        record.goal, record.reason = None, reason
        return True

    def expected_version(self, server: int, url: str) -> int | None:
        """Return the version that the server must report if it is asked now; None if its version is unknown."""
        record = self._servers.get(server)
        return None if record is None or record.url != url else record.version

    def contradicted(self, server: int, attempt: int, reason: str, now: float, *, disagrees: bool = False) -> bool:
        """Record that a check found other weights on the server than update `attempt` loaded.

        Args:
            disagrees: see `failed`.

        Returns:
            True if it leaves service because of that; False also if a later update has begun.
        """
        record = self._servers.get(server)
        if (
            record is None
            or record.attempt != attempt
            or record.state not in (ServerState.SERVING, ServerState.DRAINING)
        ):
            return False
        record.disagreements += disagrees
        self._quarantine(record, reason, now)
        record.version = None
        return True

    def healthy(self, server: int, url: str) -> bool:
        """Record that the server answered a health check; return True if it gets requests again because of that."""
        record = self._servers.get(server)
        if record is None or record.url != url:
            return False
        record.health_failures = 0
        if not record.checking:
            return False
        record.checking = False
        if self.targets.wanted(record.index) is not None:  # published meanwhile: `poll` brings it there
            return False
        record.state = ServerState.SERVING
        record.failures = 0
        record.reason = ""
        return True

    def unhealthy(self, server: int, url: str, reason: str, now: float, *, gone: bool) -> bool:
        """Record a failed health check; return True if the server leaves service because of that.

        Args:
            gone: nothing listens at the address.
        """
        record = self._servers.get(server)
        if record is None or record.url != url:
            return False
        if record.checking:
            self._quarantine(record, reason, now)
            return False
        if record.state not in (ServerState.SERVING, ServerState.DRAINING):
            return False
        record.health_failures += 1
        if not gone and record.health_failures <= HEALTH_FAILURES_ALLOWED:
            return False
        self._quarantine(record, reason, now)
        return True

    def _serving(self) -> list[FleetServer]:
        return [record for record in self._servers.values() if record.state is ServerState.SERVING]

    def _outdated(self, record: FleetServer) -> bool:
        target = self.targets.available(record)
        return target is not None and target.version not in (record.version, record.damaged)

    def _waits(self, record: FleetServer) -> bool:
        """True if the server is quarantined until its host has weights."""
        return (
            record.state is ServerState.QUARANTINED
            and self.targets.newest is not None
            and self.targets.available(record) is None
        )

    def _leaving(self) -> _Leaving:
        records = self._servers.values()
        under_way = [record for record in records if record.state in (ServerState.DRAINING, ServerState.UPDATING)]
        allowed = max(1, int(self._fraction * len(records)))
        quota = allowed - sum(not record.failures for record in under_way)
        return _Leaving(quota, len(self._serving()), bool(under_way), spares_the_last=self._mode == UpdateMode.finish)

    def _begin(self, record: FleetServer, now: float) -> BeginUpdate:
        target = self.targets.goal(record)
        assert target is not None
        quarantined = record.state in (ServerState.QUARANTINED, ServerState.ASLEEP)
        pause = PauseMode.abort if quarantined else _PAUSES[self._mode]
        slept = record.state is ServerState.ASLEEP
        self._begin_attempt(record, ServerState.UPDATING)
        record.had = None if quarantined else record.version
        record.version = None
        record.goal = target
        record.began, record.due = now, now + self._timeout_s
        frozen = quarantined and self._mode == UpdateMode.in_place
        return BeginUpdate(
            record.index, record.url, record.attempt, target, pause, frozen, record.had, record.released, slept
        )

    def _sleep(self, record: FleetServer, now: float) -> Iterator[Sleep]:
        """Order a colocated server to release its memory, unless it has, is about to, or waits after a failure."""
        if record.state in (*_UNDER_WAY, ServerState.ASLEEP):
            return
        if record.state is ServerState.QUARANTINED and now < record.due:
            return
        self._begin_attempt(record, ServerState.RELEASING)
        record.version, record.began, record.due = None, now, now + self._timeout_s
        record.released = frozenset(MemoryTag)  # from here on any part of it may be released
        yield Sleep(record.index, record.url, record.attempt)

    def _silence(self, record: FleetServer, now: float) -> str:
        """Say why the limit of the server's update, or release, is over."""
        what = "the release of its memory" if record.goal is None else f"its update to v{record.goal.version}"
        if (took_s := now - record.began) >= LONGEST_UPDATES * self._timeout_s:
            return f"{what} took {took_s:.0f} s ({LONGEST_UPDATES} times manager.update_timeout_s)"
        return (
            f"no sign of life for {self._timeout_s:g} s (manager.update_timeout_s) in {what}, which began "
            f"{took_s:.0f} s ago"
        )

    def _begin_attempt(self, record: FleetServer, state: ServerState) -> None:
        self._attempts += 1
        record.attempt, record.state, record.checking = self._attempts, state, False

    def _attempted(self, server: int, attempt: int) -> FleetServer | None:
        record = self._servers.get(server)
        wanted = record is not None and record.attempt == attempt and record.state in _UNDER_WAY
        return record if wanted else None

    def _quarantine(self, record: FleetServer, reason: str, now: float) -> None:
        record.state = ServerState.QUARANTINED
        record.reason = reason
        record.goal = None
        record.checking = False
        record.failures += 1
        record.due = now + BACKOFF.delay(record.failures)
