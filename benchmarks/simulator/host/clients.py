"""Clients of the manager and of the servers, whose calls stay in the process and cost a modelled host time."""

from __future__ import annotations

from typing import Any

from asyncrl.api import GenerationRequest, GenerationResult
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import AllocateReply, Route, RouteRequest
from asyncrl.rollout.generation.rollout_client import RolloutClient
from simulator.host.processes import Processes
from simulator.wire import Network, VirtualHttp


class SimulatedManagerClient(ManagerClient):
    """The real client with calls in the process. On a modelled host, each call costs processor time of the manager."""

    def __init__(self, worker: str, network: Network, on: Processes) -> None:
        super().__init__("http://manager", worker, None)
        self._connection.http = VirtualHttp(network)
        self._on = on

    async def allocate(self, *args: Any, **more: Any) -> AllocateReply:
        reply = await super().allocate(*args, **more)
        await self._on.manager.work(len(reply.granted) * self._on.host.manager_s / 2)
        return reply

    async def schedule(self, request: RouteRequest, timeout_s: float) -> Route | None:
        route = await super().schedule(request, timeout_s)
        await self._on.manager.work(self._on.host.manager_s / 2)
        return route


class SimulatedRolloutClient(RolloutClient):
    """The real client with calls in the process. On a modelled host, rollouts and calls cost the worker processor time,
    one after the other.
    """

    def __init__(self, manager: ManagerClient, network: Network, on: Processes, **settings: Any) -> None:
        super().__init__(manager, security=None, **settings)
        self._servers.http = VirtualHttp(network)
        self._on, self._worker = on, on.worker()

    async def generate(self, request: GenerationRequest, *args: Any, **more: Any) -> GenerationResult:
        found = await super().generate(request, *args, **more)
        tokens = sum(len(each.token_ids) for each in found.completions)
        await self._worker.work(self._on.host.rollout_s + self._on.host.rollout_token_s * tokens)
        if self._on.host.manager_s:
            self._on.begin(self._on.manager.work(self._on.host.manager_s / 2))
        return found

    async def _round(self, *args: Any) -> None:
        await self._worker.work(self._on.host.call_s / 2)
        await super()._round(*args)
        await self._worker.work(self._on.host.call_s / 2)
