"""Routes of requests: a router for each policy's servers, and the servers that left service."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection

from asyncrl.comm.waits.notifier import Notifier
from asyncrl.manager import messages as m
from asyncrl.manager.router import Caller, Router, ServerView

LOSSES_AT_LEAST, LOSSES_PER_SERVER = 256, 4
"""Number of lost servers that are remembered, at least and per server. Several processes of each server may end while a
worker is paused.
"""


class Routes:
    """Routers by the name of their policy; "" is the run's own, which is trained.

    Args:
        routing: routing policy of each.
        conversations: number of conversations that a router may remember.
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
        self._ageless = {*policies} - {*trained}
        self.changed = Notifier()
        self.losses = LostServers(manager)

    def router_of(self, policy: str) -> Router:
        """Return the router of the servers of `policy`.

        Raises:
            BadRequest: the run has no such policy.
        """
        if policy not in self._routers:
            named = ", ".join(name for name in self._routers if name) or "none"
            raise m.BadRequest(f"$.policy: {policy!r} is not one of `policies`, which has {named}")
        return self._routers[policy]

    def place(self, request: m.RouteRequest, caller: Caller, admitted_at: int) -> ServerView | None:
        """Place the request of a rollout that was admitted at this version; None if no server may have it now.

        Raises:
            BadRequest: the run has no such policy.
        """
        # servers of a policy that is not trained may have any version
        min_version = 0 if request.policy in self._ageless else max(request.min_version or 0, admitted_at)
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
        seq: number of the last loss.
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
