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
        """Reserve a place for a server that stops serving; return False if all are taken."""
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
        guests: servers that take turns with the trainer; None in a run without guests.
    """

    def __init__(
        self,
        mode: UpdateMode,
        update_timeout_s: float,
        update_fraction: float = 1.0,
        *,
        targets: ServerTargets | None = None,
        guests: ColocatedTurns | None = None,
    ) -> None:
        self.targets = targets or ServerTargets()
        self.guests = guests or ColocatedTurns()
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
        return min((life.version for life in self._serving() if life.version is not None), default=None)

    def versions_in_use(self) -> set[int]:
        """Versions that servers serve or update to; their weights may still be read."""
        goals = {life.goal.version for life in self.servers if life.goal is not None}
        return goals | {life.version for life in self.servers if life.version is not None}

    def read_on(self, host: str | None = None) -> set[int]:
        """Return versions that servers on this host read, or are about to read; without a host those on any host."""
        reading = [life for life in self._servers.values() if host in (None, host_of(life.url))]
        return self.targets.on_host(host) | {life.goal.version for life in reading if life.goal is not None}

    def register(self, index: int, url: str, version: int, now: float, *, memory: ServerMemory | None = None) -> bool:
        """Record that the server is registered at `url` with `version`. This replaces its earlier process.

        Args:
            memory: a guest's memory, as an earlier manager recorded it last.

        Returns:
            True if the server was not known yet.
        """
        known = self._servers.get(index)
        if known is not None and known.url == url:
            return False
        self.deregister(index)
        target = self.targets.wanted(index)
        current = target is None or version == target.version
        life = FleetServer(index, url, version, ServerState.SERVING if current else ServerState.QUARANTINED, due=now)
        if not current:
            life.reason = f"new at version {version}"
        if memory is not None and memory.url == url:
            life.state = ServerState.ASLEEP if memory.released else ServerState.QUARANTINED
            life.version, life.released = None, frozenset(MemoryTag)
        self._servers[index] = life
        return True

    def deregister(self, index: int) -> bool:
        """Record that the server's registration is gone; return True if it was known."""
        life = self._servers.pop(index, None)
        if life is None:
            return False
        if life.state in _UNDER_WAY:
            self._cancelled.append(CancelUpdate(index, life.attempt, "the server is gone"))
        return True

    def worked(self, index: int, now: float) -> None:
        """Record a sign of life of the server, or of the trainer that sends to it: the limit of its update begins
        again.
        """
        life = self._servers.get(index)
        if life is not None and life.state in _UNDER_WAY:
            life.due = min(now + self._timeout_s, life.began + LONGEST_UPDATES * self._timeout_s)

    def poll(self, now: float, running: Mapping[int, int]) -> list[Order]:
        """Return the orders that are due now.

        Args:
            running: by server, number of its requests; a missing server has none.
        """
        orders: list[Order] = [*self._cancelled]
        self._cancelled.clear()
        leaving = self._leaving()
        for life in self.servers:
            match life.state:
                case ServerState.UPDATING | ServerState.RELEASING if now >= life.due:
                    self._quarantine(life, self._silence(life, now), now)
                    orders.append(CancelUpdate(life.index, life.attempt, life.reason))
                case _ if self.guests.must_sleep(life.index):
                    orders += self._sleep(life, now)
                case ServerState.ASLEEP if self.guests.may_wake:
                    orders.append(self._begin(life, now))
                case ServerState.SERVING if self._outdated(life) and leaving.take_one():
                    if self._mode == UpdateMode.finish:
                        life.state = ServerState.DRAINING
                    else:
                        orders.append(self._begin(life, now))
                case ServerState.QUARANTINED if now >= life.due and not life.checking and not self._waits(life):
                    if self.targets.goal(life) is not None:
                        orders.append(self._begin(life, now))
                    else:
                        life.checking = True
                        orders.append(CheckHealth(life.index, life.url))
        for life in self.servers:
            if life.state is ServerState.DRAINING and not running.get(life.index):
                orders.append(self._begin(life, now))
        return orders

    def next_due(self) -> float | None:
        """Return the time of the next `poll` that is needed even without a report; None if none is needed."""
        timed = (*_UNDER_WAY, ServerState.QUARANTINED)
        lives = [life for life in self._servers.values() if life.state in timed and not life.checking]
        return min((life.due for life in lives if not self._waits(life)), default=None)

    def succeeded(self, server: int, attempt: int) -> bool:
        """Record that the update is done and checked."""
        life = self._attempted(server, attempt)
        if life is None or life.goal is None:
            return False
        life.version = life.goal.version
        life.state = ServerState.SERVING
        life.failures = life.disagreements = life.health_failures = 0
        life.goal = None
        life.reason = ""
        life.released = frozenset()
        return True

    def released(self, server: int, attempt: int) -> bool:
        """Record that the server has released its memory."""
        life = self._attempted(server, attempt)
        if life is None:
            return False
        life.state, life.reason, life.failures = ServerState.ASLEEP, "", 0
        return True

    def resumed(self, server: int, attempt: int, tags: Collection[MemoryTag]) -> None:
        """Record that the server has memory of these kinds again."""
        if (life := self._attempted(server, attempt)) is not None:
            life.released -= frozenset(tags)

    def failed(self, server: int, attempt: int, reason: str, now: float, *, disagrees: bool = False) -> bool:
        """Record that the update, check or release failed.

        Args:
            disagrees: the server's log-probabilities differ from the trainer's.
        """
        life = self._attempted(server, attempt)
        if life is None:
            return False
        life.disagreements += disagrees
        self._quarantine(life, reason, now)
        return True

    def never_agree(self) -> str:
        """Return the reason why no update makes a server agree with the trainer; empty if an update may, or without
        servers.
        """
        lives = self.servers
        if not lives or min(life.disagreements for life in lives) < DISAGREEMENTS_ALLOWED:
            return ""
        return f"{lives[0].reason}. So it was after {lives[0].disagreements} updates in a row, and no server agrees"

    def refused(self, server: int, attempt: int, reason: str, now: float) -> bool:
        """Record that the server refused damaged files and keeps its weights; return True if it serves those again."""
        life = self._attempted(server, attempt)
        if life is None or life.goal is None:
            return False
        life.damaged = life.goal.version
        if life.had is None:
            self._quarantine(life, reason, now)
            return False
        life.version = life.had
        life.state = ServerState.SERVING
        life.failures = life.health_failures = 0
        life.goal, life.reason = None, reason
        return True

    def expected_version(self, server: int, url: str) -> int | None:
        """Return the version that the server must report if it is asked now; None if its version is unknown."""
        life = self._servers.get(server)
        return None if life is None or life.url != url else life.version

    def contradicted(self, server: int, attempt: int, reason: str, now: float, *, disagrees: bool = False) -> bool:
        """Record that a check found other weights on the server than update `attempt` loaded.

        Args:
            disagrees: see `failed`.

        Returns:
            True if it leaves service because of that; False also if a later update has begun.
        """
        life = self._servers.get(server)
        if life is None or life.attempt != attempt or life.state not in (ServerState.SERVING, ServerState.DRAINING):
            return False
        life.disagreements += disagrees
        self._quarantine(life, reason, now)
        life.version = None
        return True

    def healthy(self, server: int, url: str) -> bool:
        """Record that the server answered a health check; return True if it gets requests again because of that."""
        life = self._servers.get(server)
        if life is None or life.url != url:
            return False
        life.health_failures = 0
        if not life.checking:
            return False
        life.checking = False
        if self.targets.wanted(life.index) is not None:  # published meanwhile: `poll` brings it there
            return False
        life.state = ServerState.SERVING
        life.failures = 0
        life.reason = ""
        return True

    def unhealthy(self, server: int, url: str, reason: str, now: float, *, gone: bool) -> bool:
        """Record a failed health check; return True if the server leaves service because of that.

        Args:
            gone: nothing listens at the address.
        """
        life = self._servers.get(server)
        if life is None or life.url != url:
            return False
        if life.checking:
            self._quarantine(life, reason, now)
            return False
        if life.state not in (ServerState.SERVING, ServerState.DRAINING):
            return False
        life.health_failures += 1
        if not gone and life.health_failures <= HEALTH_FAILURES_ALLOWED:
            return False
        self._quarantine(life, reason, now)
        return True

    def _serving(self) -> list[FleetServer]:
        return [life for life in self._servers.values() if life.state is ServerState.SERVING]

    def _outdated(self, life: FleetServer) -> bool:
        target = self.targets.available(life)
        return target is not None and target.version not in (life.version, life.damaged)

    def _waits(self, life: FleetServer) -> bool:
        """True if the server is quarantined until its host has weights."""
        return (
            life.state is ServerState.QUARANTINED
            and self.targets.newest is not None
            and self.targets.available(life) is None
        )

    def _leaving(self) -> _Leaving:
        lives = self._servers.values()
        under_way = [life for life in lives if life.state in (ServerState.DRAINING, ServerState.UPDATING)]
        allowed = max(1, int(self._fraction * len(lives)))
        quota = allowed - sum(not life.failures for life in under_way)
        return _Leaving(quota, len(self._serving()), bool(under_way), spares_the_last=self._mode == UpdateMode.finish)

    def _begin(self, life: FleetServer, now: float) -> BeginUpdate:
        target = self.targets.goal(life)
        assert target is not None
        quarantined = life.state in (ServerState.QUARANTINED, ServerState.ASLEEP)
        pause = PauseMode.abort if quarantined else _PAUSES[self._mode]
        slept = life.state is ServerState.ASLEEP
        self._begin_attempt(life, ServerState.UPDATING)
        life.had = None if quarantined else life.version
        life.version = None
        life.goal = target
        life.began, life.due = now, now + self._timeout_s
        frozen = quarantined and self._mode == UpdateMode.in_place
        return BeginUpdate(life.index, life.url, life.attempt, target, pause, frozen, life.had, life.released, slept)

    def _sleep(self, life: FleetServer, now: float) -> Iterator[Sleep]:
        """Order a guest to release its memory, unless it has, is about to, or waits after a failure."""
        if life.state in (*_UNDER_WAY, ServerState.ASLEEP):
            return
        if life.state is ServerState.QUARANTINED and now < life.due:
            return
        self._begin_attempt(life, ServerState.RELEASING)
        life.version, life.began, life.due = None, now, now + self._timeout_s
        life.released = frozenset(MemoryTag)  # from here on any part of it may be released
        yield Sleep(life.index, life.url, life.attempt)

    def _silence(self, life: FleetServer, now: float) -> str:
        """Say why the limit of the server's update, or release, is over."""
        what = "the release of its memory" if life.goal is None else f"its update to v{life.goal.version}"
        if (took_s := now - life.began) >= LONGEST_UPDATES * self._timeout_s:
            return f"{what} took {took_s:.0f} s ({LONGEST_UPDATES} times manager.update_timeout_s)"
        return (
            f"no sign of life for {self._timeout_s:g} s (manager.update_timeout_s) in {what}, which began "
            f"{took_s:.0f} s ago"
        )

    def _begin_attempt(self, life: FleetServer, state: ServerState) -> None:
        self._attempts += 1
        life.attempt, life.state, life.checking = self._attempts, state, False

    def _attempted(self, server: int, attempt: int) -> FleetServer | None:
        life = self._servers.get(server)
        wanted = life is not None and life.attempt == attempt and life.state in _UNDER_WAY
        return life if wanted else None

    def _quarantine(self, life: FleetServer, reason: str, now: float) -> None:
        life.state = ServerState.QUARANTINED
        life.reason = reason
        life.goal = None
        life.checking = False
        life.failures += 1
        life.due = now + BACKOFF.delay(life.failures)
