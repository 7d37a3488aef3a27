"""One simulated run: the control plane's own code, with simulated surroundings.

Real: `ManagerService` with its gate, router, leases and pacing; `FleetDecisions` and `FleetRunner`; `DeviceTurns` and
the rule that lends devices to guests; `ManagerClient`,
`RolloutClient` and `RolloutLoop` of every RolloutWorker; `PromptQueue`; `Collector`, `SampleBuffer` and the ranks'
`Inbox`. Simulated: the servers (`Engine`), the time that a step and its publishing take, HTTP and ZMQ (calls in
process), name resolution (a call). The master's step is that of `MasterLoop`.

At the end the run is brought to rest and audited: no rollout may be lost, no request may stay placed on a server, every
live server must serve the newest version, and no trained token may be older than allowed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.fleet.servers import ServerState, Target
from asyncrl.manager.fleet.turns import GuestTurns
from asyncrl.manager.fleet.update import UpdateCheck
from asyncrl.manager.messages import (
    Empty,
    RequestSize,
    RunReport,
    StatusReply,
)
from asyncrl.manager.rollouts.pacing import DeadlinePacing
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import ManagerConfig, UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.models.weights.transports.disk import DiskManagerEnd
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.rollout.loop import RolloutLoop
from asyncrl.rollout.settings import Pacing, RolloutConfig
from asyncrl.runtime.process.waiting import cancel
from asyncrl.verify.simulator.clock import run as run_virtual
from asyncrl.verify.simulator.device_turns import device_turns
from asyncrl.verify.simulator.host.clients import SimulatedManagerClient, SimulatedRolloutClient
from asyncrl.verify.simulator.host.cores import Cores
from asyncrl.verify.simulator.host.processes import Announcements, Processes
from asyncrl.verify.simulator.master_loop import MasterLoop, TrainCounts
from asyncrl.verify.simulator.servers.engine_model import EngineCounts
from asyncrl.verify.simulator.servers.faults import ServerFaults
from asyncrl.verify.simulator.servers.fleet import Fleet
from asyncrl.verify.simulator.servers.lengths import Lengths
from asyncrl.verify.simulator.setup import Outcome, Setup
from asyncrl.verify.simulator.simulated_code import SimulatedCode
from asyncrl.verify.simulator.trainer import DataHead
from asyncrl.verify.simulator.wire import Network, VerbsHost, VirtualHttp

LEASE_TICK_S = 1.0
REST_LIMIT_S = 7200.0
"""Virtual time within which a run must come to rest after its last step."""

_log = logging.getLogger(__name__)


class Stalled(RuntimeError):
    """A step took longer than allowed; the message shows the state of the gate and the buffer."""


@dataclass(slots=True)
class _Mark:
    """State of the run at one time."""

    at: float
    served: EngineCounts
    trained: TrainCounts


class Simulation:
    """A run of the control plane in virtual time. Make it within a virtual loop; `run` is its whole life."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._loop = asyncio.get_running_loop()
        cores = Cores(math.inf if setup.host is None else setup.host.cores)
        self.on = Processes(setup.host, cores)
        self.network = Network(encode=setup.encode)
        self.service = self._manager_service()
        guests = GuestTurns(range(setup.servers - setup.guests, setup.servers))
        self.decisions = FleetDecisions(setup.update_mode, setup.update_timeout_s, setup.update_fraction, guests=guests)
        self.fleet_runner = FleetRunner(
            *(self.decisions, self.service, VirtualHttp(self.network), DiskManagerEnd()),
            config=ManagerConfig(
                update_mode=setup.update_mode,
                update_timeout_s=setup.update_timeout_s,
                health_interval_s=setup.health_interval_s,
            ),
            checks=self._checks(),
            log=_log,
            clock=self._loop.time,
        )
        self.network.hosts["http://manager"] = VerbsHost(self.service.verbs() | {"/status": (Empty, self._status)})
        lengths: Lengths = setup.lengths.coarse(setup.grain)
        self.faults = ServerFaults(setup.faults, setup.servers, lease_s=setup.lease_s, seed=setup.seed)
        engine = setup.engine.coarse(setup.grain)
        models = [self.faults.model_of(index, engine) for index in range(setup.servers)]
        self.fleet = Fleet(models, lengths, self.network, self.fleet_runner.registered, cores)
        self.master = MasterLoop(
            setup,
            self.on,
            DataHead(4 * setup.batch * (setup.eta + 2), self.on.receive, shares_prefixes=setup.shares_prefixes),
            SimulatedManagerClient("master_worker/0", self.network, self.on),
            Announcements(self._announced, polled=setup.host is not None).announce,
            partial(device_turns, setup, self.decisions, self.fleet_runner),
        )

    def _manager_service(self) -> ManagerService:
        setup = self.setup
        return ManagerService(
            batch_size=setup.batch,
            max_staleness=setup.eta,
            routing=setup.routing,
            lease_s=30.0,
            order=DataOrder(1_000_000, setup.seed),
            first=None if setup.update_mode == UpdateMode.finish else self._first_request(),
            pacing=DeadlinePacing(setup.batch, setup.eta) if setup.pacing == Pacing.deadline else None,
            clock=self._loop.time,
        )

    async def run(self) -> Outcome:
        """Run all steps, bring the run to rest, and audit it.

        Raises:
            Stalled: a step took longer than allowed.
            Deadlock: all tasks wait, and no timer will wake one.
        """
        setup, began = self.setup, time.process_time()
        self.fleet.start()
        background = [
            asyncio.create_task(self.fleet_runner.run()),
            asyncio.create_task(self.faults.run(self.fleet)),
            asyncio.create_task(self._leases()),
            *(asyncio.create_task(self._worker(index)) for index in range(setup.workers)),
        ]
        self.master.collector.start()
        self.service.begin(RunReport())
        training = asyncio.create_task(self._train())
        try:
            await self._unless_failed(training, background)
            first, last = training.result()
            virtual_s = self._loop.time()
            resting = asyncio.create_task(self._audit())
            await self._unless_failed(resting, background)
            faults = resting.result()
        finally:
            await cancel(training, *background)
            await self.master.close()
        return self._outcome(first, last, virtual_s, time.process_time() - began, faults)

    def _announced(self, target: Target) -> None:
        """The manager learns of a version."""
        self.decisions.guests.announced = target.version
        self.fleet_runner.publish(target)

    async def _unless_failed(self, task: asyncio.Task[Any], background: list[asyncio.Task[Any]]) -> None:
        endless = [each for each in background if not each.done()]
        while not task.done():
            done, _ = await asyncio.wait([task, *endless], return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {task}:
                ended.result()  # faults that have all happened end well
                endless.remove(ended)
        task.result()

    async def _status(self, request: Empty) -> StatusReply:
        target = self.decisions.target
        newest = None if target is None else target.version
        workers = self.service.leases.workers
        return StatusReply(self.service.gate_state(), self.fleet_runner.status(), newest, workers)

    def _first_request(self) -> RequestSize:
        setup = self.setup
        size = max(1, setup.prompt_tokens // setup.grain), max(1, setup.max_new_tokens // setup.grain)
        return RequestSize(*size, setup.group)

    def _checks(self) -> tuple[UpdateCheck, ...]:
        """Return the checks that a server passes after an update, if they take time."""

        async def check(*_: Any) -> None:
            await self.on.probe.work(self.on.host.check_s)

        return (check,) if self.on.host.check_s else ()

    async def _leases(self) -> None:
        while True:
            for worker in self.service.expire_workers():
                _log.warning("the lease of %s has run out", worker)
            await asyncio.sleep(LEASE_TICK_S)

    async def _worker(self, index: int) -> None:
        """Run a RolloutWorker."""
        setup = self.setup
        most = setup.in_flight or setup.batch * (setup.eta + 1)
        concurrent = -(-most // setup.workers)
        code: Any = SimulatedCode(
            setup.turns,
            run_seed=setup.seed,
            group_size=setup.group,
            prompt_tokens=max(1, setup.prompt_tokens // setup.grain),
            max_new_tokens=max(1, setup.max_new_tokens // setup.grain),
            in_order=setup.in_order,
            user_s=setup.user_s,
        )
        config = RolloutConfig(
            max_concurrent=concurrent,
            rollout_timeout_s=setup.rollout_timeout_s,
            request_timeout_s=setup.request_timeout_s,
        )
        manager = SimulatedManagerClient(f"rollout_worker/{index}", self.network, self.on)
        requests = concurrent if setup.turns is None else concurrent * setup.group
        limits = {"max_concurrent": requests, "request_timeout_s": setup.request_timeout_s}
        async with SimulatedRolloutClient(manager, self.network, self.on, **limits) as client:
            await RolloutLoop(code, manager, client, self.master.head.push, config).run()

    async def _train(self) -> tuple[_Mark, _Mark]:
        marks = []
        self.master.turns.begin()
        for step in range(self.setup.steps):
            if step == self.setup.warm_up:
                marks.append(self._mark())
            try:
                async with asyncio.timeout(self.setup.step_limit_s):
                    await self.master.step()
            except TimeoutError:
                raise Stalled(await self._diagnosis()) from None
        self.master.turns.give()
        return marks[0], self._mark()

    async def _diagnosis(self) -> str:
        gate = await self.master.manager.describe()
        states = Counter(f"{life.state} v{life.version} {life.reason}".strip() for life in self.decisions.servers)
        return (
            f"{self.setup.name}, seed {self.setup.seed}: no step {self.master.version} "
            f"within {self.setup.step_limit_s:g} s; "
            f"at {self._loop.time():.0f} s: {self.master.buffer.describe()}; {gate[:300]}; servers: {states}"
        )

    def _mark(self) -> _Mark:
        counts = EngineCounts()
        counts.add(self.fleet.counts())
        return _Mark(self._loop.time(), counts, self.master.counts.copy())

    async def _audit(self) -> list[str]:
        """Let all rollouts end, then check that everything is accounted for."""
        found: list[str] = []
        master = self.master
        await master.manager.close_gate()
        deadline = self._loop.time() + REST_LIMIT_S
        gate, router = self.service.gate, self.service.router
        guests = [life for life in self.decisions.servers if life.index in self.decisions.guests]
        while self._loop.time() < deadline and (  # noqa: ASYNC110 (virtual time)
            gate.books().running or any(life.state is not ServerState.SERVING for life in guests)
        ):
            await asyncio.sleep(1.0)
        if running := gate.books().running:
            found.append(f"{running} rollouts still run {REST_LIMIT_S:g} s after the gate was closed")
        await asyncio.sleep(5.0)
        await master.take_rest()
        books = gate.books()
        if not books.balanced:
            found.append(f"the books do not balance: {books}")
        if books.trained != self.setup.steps * self.setup.batch:
            found.append(f"the gate counts {books.trained} trained, not {self.setup.steps * self.setup.batch}")
        if books.finished_untrained != len(master.buffer):
            found.append(f"the gate counts {books.finished_untrained} finished, the buffer has {len(master.buffer)}")
        placed = sum(view.sequences for view in router.servers)
        if placed:
            found.append(f"{placed} sequences are placed on servers where nothing runs")
        if self.fleet.sequences:
            found.append(f"{self.fleet.sequences} answers run on servers and nobody waits for them")
        if master.counts.beyond and self.setup.on_stale != OnStale.mask:
            found.append(f"{master.counts.beyond} tokens older than η={self.setup.eta} were trained")
        if not self.setup.faults.any:
            for life in self.decisions.servers:
                if life.state is not ServerState.SERVING or life.version != master.version:
                    found.append(f"server {life.index} is {life.state} at {life.version}, not serving {master.version}")
        return found

    def _outcome(self, first: _Mark, last: _Mark, virtual_s: float, real_s: float, faults: list[str]) -> Outcome:
        setup, elapsed = self.setup, last.at - first.at
        servers_s = elapsed * setup.servers
        served = last.served.since(first.served)
        before, after = first.trained, last.trained
        busy, trained = served.busy_s / servers_s, (after.train_s - before.train_s) / elapsed
        generation, training = setup.devices
        shared = generation if setup.colocated else generation * setup.guests / setup.servers
        idle = 1.0 - (busy * generation + trained * training) / (generation + training - shared)
        steps = len(after.steps) - len(before.steps)
        staleness, answers = after.staleness - before.staleness, after.answers - before.answers
        return Outcome(
            step_s=elapsed / steps,
            wait_s=(after.wait_s - before.wait_s) / steps,
            generation_idle=1.0 - busy,
            training_idle=1.0 - trained,
            idle=idle,
            running=served.running_s / servers_s,
            tokens_per_s=served.generated * setup.grain / elapsed,
            trained_per_s=staleness.total() * setup.grain / elapsed,
            staleness=staleness,
            long_share=answers[True] / answers.total(),
            interrupted=served.interrupted / served.generated if served.generated else 0.0,
            retracted=served.retracted,
            dropped=dict(self.master.reports.books.dropped),
            deaths=self.faults.deaths,
            silences=self.faults.silences,
            virtual_s=virtual_s,
            real_s=real_s,
            calls=self.network.calls,
            steps=self.master.counts.steps,
            faults=faults,
        )


def simulate(setup: Setup) -> Outcome:
    """Run `setup` in virtual time.

    Raises:
        Stalled: a step took longer than allowed.
        Deadlock: all tasks wait, and no timer will wake one.
    """

    async def main() -> Outcome:
        return await Simulation(setup).run()

    return run_virtual(main())
