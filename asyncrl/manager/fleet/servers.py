"""A generation server as `FleetDecisions` sees it, the weights that it is to have, and the orders to it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

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
class ServerLife:
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
        rested: it has released them, and is paused.
    """

    server: int
    url: str
    attempt: int
    target: Target
    pause: PauseMode
    frozen: bool = False
    had: int | None = None
    released: frozenset[MemoryTag] = frozenset()
    rested: bool = False

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
class Rest:
    """Order: interrupt the requests on the server at `url`, and have it release its memory."""

    server: int
    url: str
    attempt: int


Order = BeginUpdate | CancelUpdate | CheckHealth | Rest


def host_of(url: str) -> str:
    """Return the address of the host in a server's URL."""
    return urlsplit(url).hostname or ""
