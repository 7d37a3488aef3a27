"""The router, which chooses the generation server of each request and counts what runs where.

`Router.schedule` places a request on an eligible server (it takes requests, and its version is
recent enough) and adds the request's load to the server's counts. Exactly one of these removes it again:

- `release` (the request is done), `release_rollout` (its rollout is over), `release_worker` (its worker is gone);
- `schedule` of the same request id (it was aborted and continues elsewhere): the placement moves;
- `remove` of the server: its placements are forgotten, and their owners schedule them again.

All of them may be repeated or come in any order. The router notifies its policy of each server whose counts changed,
and the policy chooses a server. A new policy is one class and one entry in `POLICIES`. The time to place or release a
request is independent of the number of placed requests. It is at most logarithmic in the number of servers, not
counting servers whose version is too old.

A server is `returning` while it is briefly out of service for an update. Meanwhile a server gets no more than its share
of the load among the serving and returning servers (`SHARE`); further requests wait for the others. Otherwise the first
server back from an update would get all interrupted requests, and all that the new version admits, before the second
one is back.

The counts are sequences (a request for n samples counts n) and tokens that may still have to be generated or prefilled,
`prompt + n · max_new_tokens`. They count only requests that this router placed, not load from elsewhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from asyncrl.comm.ended_rollouts.recent_ids import RecentIds
from asyncrl.manager.messages import RouteRequest

SHARE = 1.25
"""While others return, a server may have this many times the mean load. With less, one late server would hold up the
serving ones.
"""
_SPARE_ENTRIES = 64
_Key = TypeVar("_Key", int, str)


class Caller(NamedTuple):
    """The worker that sends a request, and the address of its host; "" if that is not known."""

    worker: str
    host: str = ""


@dataclass(slots=True)
class ServerView:
    """A server as the router sees it.

    Attributes:
        host: address of its host.
        version: policy version that it serves.
        routable: it takes requests.
        sequences: number of placed sequences.
        tokens: number of their outstanding tokens.
    """

    index: int
    url: str
    version: int
    routable: bool
    sequences: int = 0
    tokens: int = 0
    host: str = field(init=False)

    def __post_init__(self) -> None:
        self.host = urlsplit(self.url).hostname or ""

    def may_have(self, min_version: int) -> bool:
        """True if the server accepts a request that needs this version or a newer one."""
        return self.routable and self.version >= min_version


@dataclass(frozen=True, slots=True)
class _Placement:
    """A running request, its worker and its server."""

    request: RouteRequest
    worker: str
    server: int


class Policy(Protocol):
    """A way to choose a server.

    Args:
        servers: all servers, by index.
        conversations: number of conversations that the policy may remember.
    """

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None: ...

    def changed(self, view: ServerView) -> None:
        """Record that the server's version, load or availability changed, or that it is gone from the servers."""

    def choose(self, request: RouteRequest, caller: Caller, min_version: int) -> ServerView | None:
        """Return a server for the caller's `request` that takes requests and has `min_version` or newer, if there is
        one.
        """

    def declined(self, request: RouteRequest) -> None:
        """Record that the server chosen for `request` does not get it now."""
        return


class RoundRobin(Policy):
    """Each server in turn."""

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        self._servers = servers
        self._indices: list[int] = []
        self._last = -1

    def changed(self, view: ServerView) -> None:
        place = bisect_right(self._indices, view.index)
        known = place > 0 and self._indices[place - 1] == view.index
        if view.index in self._servers and not known:
            insort(self._indices, view.index)
        elif view.index not in self._servers:
            del self._indices[place - 1]

    def choose(self, request: RouteRequest, caller: Caller, min_version: int) -> ServerView | None:
        begin, count = bisect_right(self._indices, self._last), len(self._indices)
        for turn in range(count):
            view = self._servers[self._indices[(begin + turn) % count]]
            if view.may_have(min_version):
                self._last = view.index
                return view
        return None


class _LeastLoaded(Policy):
    """The server with the least load; ties go to the lower index.

    It is a heap with an entry for every change of a server's load. An outdated entry is removed when it comes to the
    top, or when all outdated ones are removed together.
    """

    def __init__(self, servers: Mapping[int, ServerView], load: Callable[[ServerView], tuple[int, int]]) -> None:
        self._servers, self._load = servers, load
        self._heap: list[tuple[tuple[int, int], int]] = []

    def changed(self, view: ServerView) -> None:
        if view.routable:
            heapq.heappush(self._heap, (self._load(view), view.index))
        if len(self._heap) > 4 * len(self._servers) + _SPARE_ENTRIES:
            self._heap = [(self._load(view), view.index) for view in self._servers.values() if view.routable]
            heapq.heapify(self._heap)

    def choose(self, request: RouteRequest, caller: Caller, min_version: int) -> ServerView | None:
        too_old, chosen = [], None
        while self._heap and chosen is None:
            load, index = self._heap[0]
            view = self._servers.get(index)
            if view is None or not view.routable or load != self._load(view):
                heapq.heappop(self._heap)
            elif view.version < min_version:
                too_old.append(heapq.heappop(self._heap))
            else:
                chosen = view
        for entry in too_old:
            heapq.heappush(self._heap, entry)
        return chosen


class LeastRequests(_LeastLoaded):
    """The server with the fewest sequences; ties go to the fewer tokens, then to the lower index."""

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        super().__init__(servers, lambda view: (view.sequences, view.tokens))


class LeastTokens(_LeastLoaded):
    """The server with the fewest outstanding tokens."""

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        super().__init__(servers, lambda view: (view.tokens, view.sequences))


class PrefixAffine(Policy):
    """A conversation stays on the server that holds its cache; a new one goes to the server with the fewest outstanding
    tokens.

    It moves when its server takes no requests, and then stays at the new one. If there are more than `conversations`,
    those unused for longest are forgotten; each takes about 100 bytes.
    """

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        self._servers = servers
        self._home: RecentIds[int] = RecentIds(conversations)
        self._new = LeastTokens(servers, conversations)

    def changed(self, view: ServerView) -> None:
        self._new.changed(view)

    def choose(self, request: RouteRequest, caller: Caller, min_version: int) -> ServerView | None:
        home = self._home.get(request.affinity)
        chosen = None if home is None else self._servers.get(home)
        if chosen is None or not chosen.may_have(min_version):
            chosen = self._new.choose(request, caller, min_version)
        if chosen is not None and request.affinity:
            self._home.put(request.affinity, chosen.index)
        return chosen

    def declined(self, request: RouteRequest) -> None:
        self._home.pop(request.affinity)


POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affine": PrefixAffine,
}


class Router:
    """Places requests on servers and counts them, as the module's docstring describes. Pure state: no clock, no
    sockets.

    Args:
        policy: its name in `POLICIES`.
        conversations: number of conversations that the policy may remember, if it remembers any.
    """

    def __init__(self, policy: str, conversations: int) -> None:
        self._servers: dict[int, ServerView] = {}
        self._policy = POLICIES[policy](self._servers, conversations)
        self._placements: dict[str, _Placement] = {}
        self._of_rollout: dict[str, set[str]] = {}
        self._of_worker: dict[str, set[str]] = {}
        self._of_server: dict[int, set[str]] = {}
        self._sequences = 0
        self._routable = 0
        self.returning = 0
        """Number of servers that are briefly out of service."""

    @property
    def servers(self) -> list[ServerView]:
        """Return every known server, in the order of their indices."""
        return [self._servers[index] for index in sorted(self._servers)]

    def __len__(self) -> int:
        """Number of known servers."""
        return len(self._servers)

    @property
    def placed(self) -> int:
        """Number of placed requests."""
        return len(self._placements)

    def update(self, index: int, url: str, version: int, routable: bool) -> None:
        """Add a server or update it.

        A new `url` is a new server process: requests placed on the old one are forgotten.
        """
        view = self._servers.get(index)
        if view is not None and view.url != url:
            self.remove(index)
            view = None
        if view is None:
            view = self._servers[index] = ServerView(index, url, version, routable)
            self._routable += routable
        elif (view.version, view.routable) == (version, routable):
            return
        self._routable += routable - view.routable
        view.version, view.routable = version, routable
        self._policy.changed(view)

    def remove(self, index: int) -> None:
        """Remove a server; requests placed on it are forgotten."""
        for request_id in list(self._of_server.get(index, ())):
            self.release(request_id)
        if (view := self._servers.pop(index, None)) is not None:
            self._routable -= view.routable
            self._policy.changed(view)

    def schedule(self, request: RouteRequest, caller: Caller, min_version: int = 0) -> ServerView | None:
        """Place the caller's `request` on a server with `min_version` or newer, and move it if it is placed already.
        Return None if no server may have it now.
        """
        self.release(request.request_id)
        if (view := self._policy.choose(request, caller, min_version)) is None:
            return None
        if self._is_beyond_its_share(view, request):
            self._policy.declined(request)
            return None
        view.sequences += request.n
        self._sequences += request.n
        view.tokens += request.tokens
        self._policy.changed(view)
        self._placements[request.request_id] = _Placement(request, caller.worker, view.index)
        self._of_worker.setdefault(caller.worker, set()).add(request.request_id)
        self._of_server.setdefault(view.index, set()).add(request.request_id)
        if request.rollout_id is not None:
            self._of_rollout.setdefault(request.rollout_id, set()).add(request.request_id)
        return view

    def _is_beyond_its_share(self, view: ServerView, request: RouteRequest) -> bool:
        """True if the server has too much of the load to get `request` while other servers return."""
        if not self.returning:
            return False
        mean = (self._sequences + request.n) / (self._routable + self.returning)
        return view.sequences > SHARE * mean

    def release(self, request_id: str) -> None:
        """Remove a request that no longer runs."""
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return
        request = placement.request
        view = self._servers[placement.server]
        view.sequences -= request.n
        self._sequences -= request.n
        view.tokens -= request.tokens
        self._policy.changed(view)
        _discard(self._of_server, placement.server, request_id)
        _discard(self._of_worker, placement.worker, request_id)
        if request.rollout_id is not None:
            _discard(self._of_rollout, request.rollout_id, request_id)

    def release_rollout(self, rollout_id: str) -> None:
        """Remove the requests of a rollout that is over."""
        for request_id in list(self._of_rollout.get(rollout_id, ())):
            self.release(request_id)

    def release_worker(self, worker: str) -> None:
        """Remove the requests of a worker that is gone."""
        for request_id in list(self._of_worker.get(worker, ())):
            self.release(request_id)


def _discard(index: dict[_Key, set[str]], key: _Key, request_id: str) -> None:
    """Remove `request_id` from `index[key]`, and the key with its last entry."""
    members = index[key]
    members.discard(request_id)
    if not members:
        del index[key]
