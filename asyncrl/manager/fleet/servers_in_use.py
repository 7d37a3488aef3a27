"""The servers that get requests, as router, gate and clients see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import ServerState, ServerStatus
from asyncrl.manager.service import ManagerService

_UNUSED = (ServerState.QUARANTINED, ServerState.RESTING)
UNKNOWN_VERSION = -1
"""Version of a server whose weights are unknown; it gets no requests."""


class ServersInUse:
    """Keeps the router and the gate up to date with the servers that get requests, and reports lost servers to clients.

    Args:
        decisions: state of the servers.
        service: its router and gate are kept up to date.
        policy: name in `policies` of the servers' policy; empty: the run's own.
        served_version: returns the version by which the gate counts. None: the least version of these servers if they
            serve the run's own policy; else the gate does not depend on them.
    """

    def __init__(
        self,
        decisions: FleetDecisions,
        service: ManagerService,
        policy: str = "",
        served_version: Callable[[], int | None] | None = None,
    ) -> None:
        self._decisions, self._service, self._policy = decisions, service, policy
        self._router = service.routes.router_of(policy)
        self._served_version = served_version or (lambda: None if policy else decisions.served_version)
        self._shown: dict[int, tuple[str, bool]] = {}

    def update_routes(self) -> None:
        """Update the router and the gate, and report servers that left service to clients."""
        lives = {life.index: life for life in self._decisions.servers}
        self._router.returning = sum(
            life.state is ServerState.UPDATING and not life.failures for life in lives.values()
        )
        for index, (url, in_use) in list(self._shown.items()):
            life = lives.get(index)
            if life is None or life.url != url:
                self._router.remove(index)
                self._service.routes.server_lost(url)
                del self._shown[index]
            elif in_use and life.state in _UNUSED:  # a resting server answers no request
                self._service.routes.server_lost(url)
        for index, life in lives.items():
            self._shown[index] = (life.url, life.state not in _UNUSED)
            version = UNKNOWN_VERSION if life.version is None else life.version
            self._router.update(index, life.url, version, life.state is ServerState.SERVING)
        self._service.routes_changed(self._served_version())

    def running(self) -> dict[int, int]:
        """Return by server the number of sequences that run there."""
        return {view.index: view.sequences for view in self._router.servers}

    def next_end(self) -> asyncio.Future[bool]:
        """Return a future that the end of a request completes; cancel it when it is no longer needed."""
        return self._service.progress.next()

    def status(self) -> list[ServerStatus]:
        """Return the state of each server for `/status`."""
        views = {view.index: view for view in self._router.servers}
        return [
            ServerStatus(
                index=life.index,
                url=life.url,
                state=life.state,
                version=life.version,
                goal=None if life.goal is None else life.goal.version,
                reason=life.reason,
                failures=life.failures,
                sequences=views[life.index].sequences if life.index in views else 0,
                tokens=views[life.index].tokens if life.index in views else 0,
                policy=self._policy,
            )
            for life in self._decisions.servers
        ]
