"""The router: which generation server gets a request, and what runs where.

Mechanism
---------
`Router.schedule` places a request on a server that may have it (it takes requests, and its version is recent enough)
and adds its load to the server's counts; exactly one thing takes it off again:

- `release` (the request is done), `release_rollout` (its rollout is over), `release_worker` (its worker is gone);
- `schedule` of the same request id (it was aborted and goes on elsewhere): the placement moves;
- `remove` of the server: its placements are forgotten, and their owners schedule them again.

All of them may be repeated or come in any order. A policy sees the servers' counts and picks one; it is a few lines of
its own, so that another is one class and one entry in `POLICIES`.

The counts are sequences (a request for n samples counts n) and tokens that may still have to be generated or prefilled,
`prompt + n · max_new_tokens`. They are what this router placed: a load that others put on a server is not seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.manager.messages import RouteRequest

AFFINITIES_KEPT = 65_536
"""Conversations whose server `prefix_affine` remembers; the one unused for longest goes first. About 200 bytes each."""


@dataclass(slots=True)
class ServerView:
    """A server as the router sees it. `routable`: it takes requests; `version`: the policy version it serves."""

    index: int
    url: str
    version: int
    routable: bool = True
    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Placement:
    """Which request of which worker runs where."""

    request: RouteRequest
    worker: str
    server: int


class Policy(Protocol):
    """Chooses among `candidates` (not empty, in the order of their indices)."""

    def choose(self, candidates: Sequence[ServerView], request: RouteRequest) -> ServerView: ...


class RoundRobin:
    """Each server in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[ServerView], request: RouteRequest) -> ServerView:
        chosen = next((view for view in candidates if view.index > self._last), candidates[0])
        self._last = chosen.index
        return chosen


class LeastRequests:
    """The server with the fewest sequences; ties go to the fewer tokens, then to the lower index."""

    def choose(self, candidates: Sequence[ServerView], request: RouteRequest) -> ServerView:
        return min(candidates, key=lambda view: (view.sequences, view.tokens))


class LeastTokens:
    """The server with the fewest outstanding tokens."""

    def choose(self, candidates: Sequence[ServerView], request: RouteRequest) -> ServerView:
        return min(candidates, key=lambda view: (view.tokens, view.sequences))


class PrefixAffine:
    """A conversation stays on the server that holds its cache; a new one goes where the fewest tokens are outstanding.

    It moves when its server takes no requests, and stays where it went.
    """

    def __init__(self, kept: int = AFFINITIES_KEPT) -> None:
        self._kept = kept
        self._home: OrderedDict[str, int] = OrderedDict()
        self._new = LeastTokens()

    def choose(self, candidates: Sequence[ServerView], request: RouteRequest) -> ServerView:
        home = self._home.get(request.affinity)
        chosen = next((view for view in candidates if view.index == home), None)
        if chosen is None:
            chosen = self._new.choose(candidates, request)
        if request.affinity:
            self._home[request.affinity] = chosen.index
            self._home.move_to_end(request.affinity)
            if len(self._home) > self._kept:
                self._home.popitem(last=False)
        return chosen


POLICIES: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affine": PrefixAffine,
}


class Router:
    """Places requests on servers and keeps count; see the module's docstring. Pure state: no clock, no sockets."""

    def __init__(self, policy: str) -> None:
        self._policy = POLICIES[policy]()
        self._servers: dict[int, ServerView] = {}
        self._placements: dict[str, _Placement] = {}
        self._of_rollout: dict[str, set[str]] = {}
        self._of_worker: dict[str, set[str]] = {}

    @property
    def servers(self) -> list[ServerView]:
        """Every known server, in the order of their indices."""
        return list(self._servers.values())

    @property
    def placed(self) -> int:
        """Requests that are placed."""
        return len(self._placements)

    def update(self, index: int, url: str, version: int, routable: bool) -> None:
        """Add a server or change what is known of it.

        A new `url` is a new server process: what was placed on the old one is forgotten.
        """
        view = self._servers.get(index)
        if view is not None and view.url != url:
            self.remove(index)
            view = None
        if view is None:
            self._servers[index] = ServerView(index, url, version, routable)
            self._servers = dict(sorted(self._servers.items()))
        else:
            view.version = version
            view.routable = routable

    def remove(self, index: int) -> None:
        """The server is gone, and what was placed on it is forgotten."""
        for request_id in [key for key, placement in self._placements.items() if placement.server == index]:
            self.release(request_id)
        self._servers.pop(index, None)

    def schedule(self, request: RouteRequest, worker: str, min_version: int = 0) -> ServerView | None:
        """Place `request` of `worker` on a server at `min_version` or newer, moving it if it is placed already; None
        where no server may have it now.
        """
        self.release(request.request_id)
        candidates = [view for view in self._servers.values() if view.routable and view.version >= min_version]
        if not candidates:
            return None
        view = self._policy.choose(candidates, request)
        view.sequences += request.n
        view.tokens += request.tokens
        self._placements[request.request_id] = _Placement(request, worker, view.index)
        self._of_worker.setdefault(worker, set()).add(request.request_id)
        if request.rollout_id is not None:
            self._of_rollout.setdefault(request.rollout_id, set()).add(request.request_id)
        return view

    def release(self, request_id: str) -> None:
        """The request no longer runs."""
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return
        request = placement.request
        view = self._servers[placement.server]
        view.sequences -= request.n
        view.tokens -= request.tokens
        _discard(self._of_worker, placement.worker, request_id)
        if request.rollout_id is not None:
            _discard(self._of_rollout, request.rollout_id, request_id)

    def release_rollout(self, rollout_id: str) -> None:
        """The rollout is over, and its requests with it."""
        for request_id in list(self._of_rollout.get(rollout_id, ())):
            self.release(request_id)

    def release_worker(self, worker: str) -> None:
        """The worker is gone, and its requests with it."""
        for request_id in list(self._of_worker.get(worker, ())):
            self.release(request_id)


def _discard(index: dict[str, set[str]], key: str, request_id: str) -> None:
    """Take `request_id` out of `index[key]`, and the key with its last entry."""
    members = index[key]
    members.discard(request_id)
    if not members:
        del index[key]
