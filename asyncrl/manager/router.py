"""The router, which chooses the generation server of each request and counts what runs where.

`Routes` has a router for each policy's servers, and the servers that left service. `Router.schedule` places a request
on an eligible server (it takes requests, and its version is recent enough) and adds its load to the server's counts.
Exactly one of these removes it again:

- `release` (the request is done), `release_rollout` (its rollout is over), `release_worker` (its worker is gone);
- `schedule` of the same request id (it was aborted and continues elsewhere): the placement moves;
- `remove` of the server: its placements are forgotten, and their owners schedule them again.

All of them may be repeated or come in any order. The router notifies its policy of each server whose counts changed,
and the policy chooses one of those that may have the request. A new policy is one class and one entry in `POLICIES`.
The time to place or release a request is independent of the number of placed requests. It is at most logarithmic in the
number of servers, not counting servers that may not have the request.

A server is `returning` while it is briefly out of service for an update. Meanwhile a server gets no more than its share
of the load among the serving and returning servers (`SHARE`); further requests wait for the others. Otherwise the first
server back from an update would get all interrupted requests, and all that the new version admits, before the second
one is back.

The counts are sequences (a request for n samples counts n) and tokens that may still have to be generated or prefilled,
`prompt + n · max_new_tokens`. They count only requests that this router placed, not load from elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

from asyncrl.comm.ended_rollouts import RecentIds
from asyncrl.comm.waits import Notifier
from asyncrl.manager.messages import BadRequest, RouteRequest

LOSSES_AT_LEAST, LOSSES_PER_SERVER = 256, 4
"""Number of lost servers that are remembered, at least and per server. Several processes of each server may end while a
worker is paused.
"""
SHARE = 1.25
"""While others return, a server may have this many times the mean load. With less, one late server would hold up the
serving ones.
"""
_SPARE_ENTRIES = 64
_Key = TypeVar("_Key", int, str)


class Caller(NamedTuple):
    """The worker that sends a request, and its process's `system.host`, to be compared with `ServerView.host`; "" if
    that is not known.
    """

    worker: str
    host: str = ""


@dataclass(slots=True)
class ServerView:
    """A server as the router sees it.

    Attributes:
        host: its process's `system.host`, to be compared with `Caller.host`; of a server outside the run, the host in
            its URL.
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


_MayHave: TypeAlias = Callable[[ServerView], bool]
"""True for a server that takes requests, has the version that the request needs, and is within its share."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """A running request, its worker and its server."""

    request: RouteRequest
    worker: str
    server: int


class Policy(ABC):
    """A way to choose a server.

    Args:
        servers: all servers, by index.
        conversations: number of conversations that the policy may remember.
    """

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        self._servers = servers

    def changed(self, view: ServerView) -> None:
        """Record that the server's version, load or availability changed, or that it is gone from the servers."""
        return

    @abstractmethod
    def choose(self, request: RouteRequest, caller: Caller, may_have: _MayHave) -> ServerView | None:
        """Return a server that may have the caller's `request`; None if there is none."""


class RoundRobin(Policy):
    """Each server in turn."""

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        super().__init__(servers, conversations)
        self._indices: list[int] = []
        self._last = -1

    def changed(self, view: ServerView) -> None:
        if len(self._indices) != len(self._servers):
            self._indices = sorted(self._servers)

    def choose(self, request: RouteRequest, caller: Caller, may_have: _MayHave) -> ServerView | None:
        begin, count = bisect_right(self._indices, self._last), len(self._indices)
        for turn in range(count):
            view = self._servers[self._indices[(begin + turn) % count]]
            if may_have(view):
                self._last = view.index
                return view
        return None


class _LeastLoaded(Policy):
    """The server with the least load; ties go to the lower index.

    It is a heap with an entry for every change of a server's load. An outdated entry is removed when it comes to the
    top, or when all outdated ones are removed together.
    """

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        super().__init__(servers, conversations)
        self._heap: list[tuple[tuple[int, int], int]] = []

    _load: Callable[[ServerView], tuple[int, int]]

    def changed(self, view: ServerView) -> None:
        if view.routable:
            heapq.heappush(self._heap, (self._load(view), view.index))
        if len(self._heap) > 4 * len(self._servers) + _SPARE_ENTRIES:
            self._heap = [(self._load(view), view.index) for view in self._servers.values() if view.routable]
            heapq.heapify(self._heap)

    def choose(self, request: RouteRequest, caller: Caller, may_have: _MayHave) -> ServerView | None:
        set_aside, chosen = [], None
        while self._heap and chosen is None:
            load, index = self._heap[0]
            view = self._servers.get(index)
            if view is None or not view.routable or load != self._load(view):
                heapq.heappop(self._heap)
            elif may_have(view):
                chosen = view
            else:
                set_aside.append(heapq.heappop(self._heap))
        for entry in set_aside:
            heapq.heappush(self._heap, entry)
        return chosen


class LeastRequests(_LeastLoaded):
    """The server with the fewest sequences; ties go to the fewer tokens, then to the lower index."""

    _load = attrgetter("sequences", "tokens")


class LeastTokens(_LeastLoaded):
    """The server with the fewest outstanding tokens."""

    _load = attrgetter("tokens", "sequences")


class PrefixAffine(Policy):
    """A conversation stays on the server that holds its cache; a new one goes to the server with the fewest outstanding
    tokens.

    It moves when its server takes no requests, and then stays at the new one. If its server takes requests but may not
    have this one, only this one goes elsewhere. If there are more than `conversations`, those unused for longest are
    forgotten; each takes about 100 bytes.
    """

    def __init__(self, servers: Mapping[int, ServerView], conversations: int) -> None:
        super().__init__(servers, conversations)
        self._home: RecentIds[int] = RecentIds(conversations)
        self._new = LeastTokens(servers, conversations)

    def changed(self, view: ServerView) -> None:
        self._new.changed(view)

    def choose(self, request: RouteRequest, caller: Caller, may_have: _MayHave) -> ServerView | None:
        known = self._home.get(request.affinity)
        home = None if known is None else self._servers.get(known)
        chosen = home if home is not None and may_have(home) else self._new.choose(request, caller, may_have)
        if chosen is not None and request.affinity:
            self._home.put(request.affinity, (home if home is not None and home.routable else chosen).index)
        return chosen


POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affine": PrefixAffine,
}


class Router:
    """Places requests on servers and counts them, as the module's docstring describes. Pure state: no clock, no
    sockets.
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
        self._least = 0
        """Lower bound of the sequences of each server that takes requests. If it is beyond the share, a request waits
        without a look at the servers.
        """
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
        self._least = min(self._least, view.sequences)
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
        share = inf
        if self.returning:
            share = SHARE * (self._sequences + request.n) / (self._routable + self.returning)
        if self._least > share:
            return None

        def may_have(view: ServerView) -> bool:
            return view.routable and view.version >= min_version and view.sequences <= share

        view = self._policy.choose(request, caller, may_have)
        if view is None:
            if self.returning:
                self._least = min((each.sequences for each in self._servers.values() if each.routable), default=0)
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

    def release(self, request_id: str) -> None:
        """Remove a request that no longer runs."""
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return
        request = placement.request
        view = self._servers[placement.server]
        view.sequences -= request.n
        self._sequences -= request.n
        self._least = min(self._least, view.sequences)
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


class Routes:
    """Routers by the name of their policy; "" is the run's own, which is trained.

    Args:
        policies: names of the policies besides the run's own that agents may ask.
        trained: those of them that are trained.
        manager: number of this manager among those of the launch.

    Attributes:
        changed: notified when servers have changed, so that a request that waited may be placed.
        losses: servers that left service unexpectedly.
    """

    def __init__(
        self,
        routing: str,
        conversations: int,
        policies: Collection[str] = (),
        trained: Collection[str] = (),
        *,
        manager: int = 0,
    ) -> None:
        self._routers = {policy: Router(routing, conversations) for policy in ("", *policies)}
        self._untrained = {*policies} - {*trained}
        self.changed = Notifier()
        self.losses = LostServers(manager)

    def router_of(self, policy: str) -> Router:
        """Return the router of the servers of `policy`."""
        if policy not in self._routers:
            named = ", ".join(name for name in self._routers if name) or "none"
            raise BadRequest(f"$.policy: {policy!r} is not one of `policies`, which has {named}")
        return self._routers[policy]

    def place(self, request: RouteRequest, caller: Caller, admitted_at: int) -> ServerView | None:
        """Place the request of a rollout that was admitted at this version; None if no server may have it now."""
        # servers of a policy that is not trained may have any version
        min_version = 0 if request.policy in self._untrained else max(request.min_version or 0, admitted_at)
        return self.router_of(request.policy).schedule(request, caller, min_version)

    def release(self, request_id: str) -> None:
        """Remove a request that no longer runs."""
        for router in self._routers.values():
            router.release(request_id)

    def release_rollout(self, rollout_id: str) -> None:
        """Remove the requests of a rollout that is over, for every policy."""
        for router in self._routers.values():
            router.release_rollout(rollout_id)

    def release_worker(self, worker: str) -> None:
        """Remove the requests of a worker that is gone."""
        for router in self._routers.values():
            router.release_worker(worker)

    def server_lost(self, url: str) -> None:
        """Report to the owners of requests at `url` that they may never be answered."""
        self.losses.add(url, sum(map(len, self._routers.values())))


class LostServers:
    """Servers that left service unexpectedly, numbered. Each worker asks for those after the last number that it knows.

    Args:
        manager: number of this manager among those of the launch.

    Attributes:
        changed: notified at each loss.
    """

    def __init__(self, manager: int) -> None:
        self.seq = manager << 40
        """Number of the last loss."""
        self.changed = Notifier()
        self._losses: OrderedDict[str, int] = OrderedDict()  # by URL the number of the last, ascending

    def __len__(self) -> int:
        """Number of URLs that are remembered."""
        return len(self._losses)

    def add(self, url: str, servers: int) -> None:
        """Record that the server at `url` is lost; `servers` is the number of servers that remain known."""
        self.seq += 1
        self._losses.pop(url, None)
        self._losses[url] = self.seq
        if len(self._losses) > max(LOSSES_AT_LEAST, LOSSES_PER_SERVER * servers):
            self._losses.popitem(last=False)
        self.changed.notify()

    def since(self, after: int) -> list[str]:
        """Return the URLs of losses with a number above `after`, in the order of the losses."""
        newest_first = itertools.takewhile(lambda loss: loss[1] > after, reversed(self._losses.items()))
        return [url for url, _ in newest_first][::-1]
