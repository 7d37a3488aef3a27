"""A generation server as `FleetDecisions` sees it, the weights that it is to have, the orders to it, and the turns
of servers on the trainer's devices. Pure state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from asyncrl.comm.names import TrainerTurn
from asyncrl.inference.client import MemoryTag, PauseMode
from asyncrl.manager.messages import ServerState


@dataclass(frozen=True, slots=True)
class Target:
    """Published weights: version, folder, and the folder of the server's own `copy` if there is one."""

    version: int
    path: str
    copy: str = ""

    @property
    def read_at(self) -> str:
        """The folder that the server reads."""
        return self.copy or self.path


@dataclass(slots=True)
class FleetServer:
    """One server.

    Attributes:
        version: version that it serves; None if unknown.
        failures: number of failed updates and checks since it last served.
        disagreements: number of updates since it last served after which its log-probabilities differed from the
            trainer's.
        began: time in seconds at which its update or release began.
        due: time in seconds at which its state has to change.
        reason: cause of its state, for people.
        goal: weights of the running update.
        had: version that it served before the running update; None if it was unknown.
        damaged: newest version whose files it refused.
        checking: a health check runs that may end the quarantine.
        released: kinds of memory that it has released, or may have.
    """

    index: int
    url: str
    version: int | None
    state: ServerState
    attempt: int = 0
    failures: int = 0
    disagreements: int = 0
    health_failures: int = 0
    began: float = 0.0
    due: float = 0.0
    reason: str = ""
    goal: Target | None = None
    had: int | None = None
    damaged: int | None = None
    checking: bool = False
    released: frozenset[MemoryTag] = frozenset()


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Order: pause the server at `url` and bring it to `target`.

    Attributes:
        pause: `abort` ends running requests, the other modes keep them.
        frozen: an update in place failed before, so requests may be frozen.
        had: version that the server served until now; None if unknown.
        released: kinds of memory that the server may have released.
        slept: it has released them, and is paused.
    """

    server: int
    url: str
    attempt: int
    target: Target
    pause: PauseMode
    frozen: bool = False
    had: int | None = None
    released: frozenset[MemoryTag] = frozenset()
    slept: bool = False

    @property
    def keeps_requests(self) -> bool:
        """True if running requests continue by themselves after the update."""
        return self.pause != PauseMode.abort

    @property
    def keeps_cache(self) -> bool:
        """True if running requests continue with the keys and values that they have."""
        return self.pause == PauseMode.in_place


@dataclass(frozen=True, slots=True)
class CancelUpdate:
    """Order: cancel this attempt, for a reason; its outcome no longer matters."""

    server: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Order: check the health of the quarantined server at `url`, for which there are no weights."""

    server: int
    url: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Order: interrupt the requests on the server at `url`, and have it release its memory."""

    server: int
    url: str
    attempt: int


Order = BeginUpdate | CancelUpdate | CheckHealth | Sleep


def host_of(url: str) -> str:
    """Return the address of the host in a server's URL."""
    return urlsplit(url).hostname or ""


class ServerTargets:
    """Weights that servers are to have, and those that they can have now.

    Args:
        staged: hosts share no folder, so that a server can only have weights that `arrived` on its host.
        initial: folder of the initial model.

    Attributes:
        newest: newest published weights; None before the first.
    """

    def __init__(self, *, staged: bool = False, initial: str = "") -> None:
        self.newest: Target | None = None
        self._before: Target | None = None
        self._initial = Target(0, initial)
        self._assigned: dict[int, Target] = {}
        self._on_hosts: dict[str, Target] | None = {} if staged else None

    def publish(self, target: Target) -> None:
        """Set the newest weights. An older target than the present one is ignored."""
        if self.newest is None or target.version > self.newest.version:
            self._before, self.newest = self.newest, target

    def assign(self, server: int, target: Target) -> None:
        """Set this server's weights to `target`, even if they are older than its present ones. Published targets no
        longer apply to it.
        """
        self._assigned[server] = target

    def arrived(self, host: str, target: Target) -> None:
        """Record that the host at this address has these weights. Ignored if it has newer ones."""
        assert self._on_hosts is not None, "hosts share a folder"
        present = self._on_hosts.get(host)
        if present is None or target.version >= present.version:
            self._on_hosts[host] = target

    def lost(self, host: str) -> None:
        """Record that the host has no weights any more."""
        assert self._on_hosts is not None, "hosts share a folder"
        self._on_hosts.pop(host, None)

    def on_host(self, host: str | None = None) -> set[int]:
        """Return the version that arrived on this host, if any; without a host those on all hosts."""
        return {target.version for where, target in (self._on_hosts or {}).items() if host in (None, where)}

    def wanted(self, server: int) -> Target | None:
        """Return the weights that the server should have; None if it keeps those that it began with."""
        return self._assigned.get(server, self.newest)

    def available(self, record: FleetServer) -> Target | None:
        """Return the newest weights that the server can have now."""
        return self.wanted(record.index) if self._on_hosts is None else self._on_hosts.get(host_of(record.url))

    def goal(self, record: FleetServer) -> Target | None:
        """Return the weights that the next update loads.

        A server that has released its memory gets the initial model if there is no version. If it found the newest
        version's files damaged, it gets the previous version.
        """
        target = self.available(record)
        if not record.released:
            return target
        if target is not None and target.version == record.damaged:
            target = self._before
        return target or self._initial


class ColocatedTurns:
    """Turns of the trainer and of colocated servers; `asyncrl.colocated` has the rules.

    Args:
        colocated: indices of the servers on the trainer's devices; without any the turns have no effect.

    Attributes:
        turn: newest announced turn. Before the first one the trainer has the devices, as its ranks load their models.
        announced: newest version that was announced to the manager, even if servers cannot load it.
    """

    def __init__(self, colocated: Collection[int] = ()) -> None:
        self._colocated = frozenset(colocated)
        self.turn = TrainerTurn(0, training=bool(colocated), version=0)
        self.announced = 0

    def __contains__(self, server: int) -> bool:
        return server in self._colocated

    def __bool__(self) -> bool:
        return bool(self._colocated)

    def begin(self, turn: TrainerTurn) -> None:
        """Begin the announced turn. A turn older than the current one is ignored."""
        if turn.number > self.turn.number:
            self.turn = turn

    def must_sleep(self, server: int) -> bool:
        """True if the server may have no memory now."""
        return self.turn.training and server in self._colocated

    @property
    def may_wake(self) -> bool:
        """True if colocated servers may wake: the version that they will load is known, so each loads only once."""
        return not self.turn.training and self.announced >= self.turn.version
