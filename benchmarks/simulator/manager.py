"""The GserverManager and the RolloutWorkers of a simulated run: their own code, reached by calls in the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from asyncrl.api.trajectory import Trajectory
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner, ServerUpdater
from asyncrl.manager.fleet.servers import ColocatedTurns, Target
from asyncrl.manager.messages import RequestSize, StatusReply, StatusRequest
from asyncrl.manager.rollouts.pacing import DeadlinePacing
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import UpdateMode
from asyncrl.rollout.loop import RolloutLoop
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.settings import Pacing, RolloutConfig
from asyncrl.weights.transports.base import ManagerEnd
from simulator.setup import Setup
from simulator.simulated_code import simulated_code
from simulator.wire import MethodsHost, Network, VirtualHttp

LEASE_TICK_S, UPDATE_TIMEOUT_S, ROLLOUT_TIMEOUT_S = 1.0, 60.0, 3600.0

_log = logging.getLogger(__name__)


class SimulatedManager:
    """The manager at `http://manager`: its gate, router and leases, which servers update, and their updates."""

    def __init__(self, setup: Setup, network: Network) -> None:
        clock = asyncio.get_running_loop().time
        size = RequestSize(setup.prompt_units, setup.most_units, setup.group)
        self.service = ManagerService(
            batch_size=setup.batch,
            max_staleness=setup.eta,
            routing="least_requests",
            lease_s=30.0,
            order=DataOrder(1_000_000, setup.seed),
            first=None if setup.update_mode == UpdateMode.finish else size,
            pacing=DeadlinePacing(setup.batch, setup.eta) if setup.pacing == Pacing.deadline else None,
            clock=clock,
        )
        colocated_servers = ColocatedTurns(range(setup.servers - setup.colocated_servers, setup.servers))
        self.decisions = FleetDecisions(
            setup.update_mode, UPDATE_TIMEOUT_S, setup.update_fraction, colocated=colocated_servers
        )
        http = VirtualHttp(network)
        self.runner = FleetRunner(
            self.decisions,
            self.service,
            ServerUpdater(http, ManagerEnd(), timeout_s=UPDATE_TIMEOUT_S, check=None),
            http,
            health_interval_s=setup.health_interval_s,
            served_version=lambda: self.decisions.served_version,
            log=_log,
            clock=clock,
        )
        network["http://manager"] = MethodsHost(self.service.methods() | {"/status": (StatusRequest, self._status)})

    def announced(self, target: Target) -> None:
        """Make `target` the version that servers update to."""
        self.decisions.colocated.announced = target.version
        self.runner.publish(target)

    async def expire_leases(self) -> NoReturn:
        """End the leases of workers that do not renew them."""
        while True:
            for worker in self.service.expire_workers():
                _log.warning("the lease of %s has run out", worker)
            await asyncio.sleep(LEASE_TICK_S)

    async def _status(self, request: StatusRequest) -> StatusReply:
        target = self.decisions.targets.newest
        newest = None if target is None else target.version
        return StatusReply(self.service.gate_state(), self.runner.status(), newest, self.service.workers.alive)


def manager_client(worker: str, network: Network) -> ManagerClient:
    """Return the real client of the manager, with calls in the process."""
    client = ManagerClient("http://manager", worker, None)
    client._http = VirtualHttp(network)
    return client


async def run_worker(index: int, setup: Setup, network: Network, push: Callable[[Trajectory], Awaitable[Any]]) -> None:
    """Run the RolloutWorker `index`; `push` sends its trajectories."""
    most = setup.in_flight or setup.batch * (setup.eta + 1)
    concurrent = -(-most // setup.workers)
    code: Any = simulated_code(setup)
    limit_s = setup.request_timeout_s
    config = RolloutConfig(max_concurrent=concurrent, rollout_timeout_s=ROLLOUT_TIMEOUT_S, request_timeout_s=limit_s)
    manager = manager_client(f"rollout_worker/{index}", network)
    client = RolloutClient(manager, security=None, max_concurrent=concurrent, request_timeout_s=limit_s)
    client._servers.http = VirtualHttp(network)
    async with client:
        await RolloutLoop(code, manager, client, push, config).run()
