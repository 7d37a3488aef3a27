"""A generation server as `FleetDecisions` sees it, the weights that it is to have, and the orders to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from asyncrl.inference.client import MemoryTag, PauseMode


class ServerState(StrEnum):
    """State of a server (module docstring)."""

    SERVING = "serving"
    DRAINING = "draining"
    UPDATING = "updating"
    QUARANTINED = "quarantined"
    RELEASING = "releasing"
    RESTING = "resting"


@dataclass(frozen=True, slots=True)
class Target:
    """Published weights: version and folder, and the folder of the server's `copy` if it has one."""

    version: int
    path: str
    copy: str = ""

    @property
    def read_at(self) -> str:
        """The folder that the server reads."""
        return self.copy or self.path


@dataclass(slots=True)
class ServerLife:
    """One server. `version` is what it serves, None while nobody knows; `due`, in s, when its state has to change.

    `had` is what it served before the update under way, None where nobody knew; `damaged` the newest version whose
    files it refused; `released` what memory it has given back, or may have.
    """

    index: int
    url: str
    version: int | None
    state: ServerState
    attempt: int = 0
    failures: int = 0
    health_failures: int = 0
    due: float = 0.0
    reason: str = ""
    goal: Target | None = None
    had: int | None = None
    damaged: int | None = None
    checking: bool = False
    released: frozenset[MemoryTag] = frozenset()


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Order: pause the server at `url` (`abort` ends what runs, the other ways keep it) and bring it to `target`.

    `frozen`: an update in place failed before, so requests may be frozen. `had`: the version that it served until now;
    None if unknown. `released`: kinds of memory that the server may have given back; `rested`: it has, and is paused.
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
    """Order: give up this attempt; its outcome is not wanted any more."""

    server: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Order: see whether the quarantined server at `url` is well again; there are no weights to bring it."""

    server: int
    url: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Order: interrupt what runs on the server at `url`, and have it give its memory back."""

    server: int
    url: str
    attempt: int


Order = BeginUpdate | CancelUpdate | CheckHealth | Rest


def host_of(url: str) -> str:
    """The address of the host in the URL of a server on it."""
    return urlsplit(url).hostname or ""
