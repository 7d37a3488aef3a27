"""One simulated run: the control plane's own code, with simulated surroundings.

Real: `ManagerService` with its gate, router, leases and pacing; `FleetDecisions` and `FleetRunner`; `DeviceTurns` and
the rule that wakes the colocated servers; `ManagerClient`, `RolloutClient` and `RolloutLoop` of every RolloutWorker;
`PromptQueue`; `Collector`, `SampleBuffer` and the ranks' `Inbox`. Simulated: the servers (`Engine`), the time that a
step and its publishing take, HTTP and ZMQ (calls in process), name resolution (a call). The master's step is that of
`MasterLoop`.

At the end the run is brought to rest and audited. No rollout may be lost, and no request may stay placed on a server.
Every live server must serve the newest version, and no trained token may be older than allowed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from asyncrl.manager.messages import CloseGate, RunBegin, ServerState, StatusRequest
from asyncrl.master.settings import OnStale
from asyncrl.runtime.process.waiting import cancel
from simulator.clock import run as run_virtual
from simulator.engine import EngineCounts
from simulator.manager import SimulatedManager, manager_client, run_worker
from simulator.master import DataHead, MasterLoop, TrainCounts, device_turns
from simulator.servers import Fleet, ServerFaults
from simulator.setup import STEP_LIMIT_S, Outcome, Setup
from simulator.wire import Network

DRAIN_LIMIT_S = 7200.0
"""Virtual time within which a run must come to rest after its last step."""


class Stalled(RuntimeError):
    """A step took longer than allowed; the message shows the state of the gate and the buffer."""


_Mark = tuple[float, EngineCounts, TrainCounts]
"""State of the run at one time: seconds, the servers' work, the training."""


class Simulation:
    """A run of the control plane in virtual time. Create it within a virtual loop, and call `run` once."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._loop = asyncio.get_running_loop()
        self.network: Network = {}
        self.manager = SimulatedManager(setup, self.network)
        lengths = setup.lengths.coarse(setup.grain)
        self.faults = ServerFaults(setup.faults, setup.seed)
        engine = setup.engine.coarse(setup.grain)
        self.fleet = Fleet(setup.servers, engine, lengths, self.network, self.manager.runner.registered)
        self.master = MasterLoop(
            setup,
            DataHead(4 * setup.batch * (setup.eta + 2)),
            manager_client("master_worker/0", self.network),
            self.manager.announced,
            partial(device_turns, setup, self.manager.decisions, self.manager.runner),
        )

    async def run(self) -> Outcome:
        """Run all steps, bring the run to rest, and audit it.

        Raises:
            Stalled: a step took longer than allowed.
            Deadlock: all tasks wait, and no timer will wake one.
        """
        setup = self.setup
        self.fleet.start()
        workers = [run_worker(index, setup, self.network, self.master.head.push) for index in range(setup.workers)]
        parts = [self.manager.runner.run(), self.faults.run(self.fleet), self.manager.expire_leases(), *workers]
        background = [asyncio.create_task(each) for each in parts]
        self.manager.service.begin(RunBegin())
        self.master.collector.start()
        training = asyncio.create_task(self._train())
        try:
            await self._unless_failed(training, background)
            first, last = training.result()
            draining = asyncio.create_task(self._audit())
            await self._unless_failed(draining, background)
            faults = draining.result()
        finally:
            await cancel(training, *background)
            await self.master.close()
        return self._outcome(first, last, faults)

    async def _unless_failed(self, task: asyncio.Task[Any], background: list[asyncio.Task[Any]]) -> None:
        endless = [each for each in background if not each.done()]
        while not task.done():
            done, _ = await asyncio.wait([task, *endless], return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {task}:
                ended.result()  # the task of the faults ends once all have happened
                endless.remove(ended)
        task.result()

    async def _train(self) -> tuple[_Mark, _Mark]:
        marks = []
        self.master.turns.begin()
        for step in range(self.setup.steps):
            if step == self.setup.warm_up:
                marks.append(self._mark())
            try:
                async with asyncio.timeout(STEP_LIMIT_S):
                    await self.master.step()
            except TimeoutError:
                raise Stalled(await self._diagnosis()) from None
        self.master.turns.give()
        return marks[0], self._mark()

    async def _diagnosis(self) -> str:
        gate = (await self.master.manager.call(StatusRequest())).describe()[:300]
        states = Counter(f"{one.state} v{one.version} {one.reason}".strip() for one in self.manager.decisions.servers)
        when = f"seed {self.setup.seed}, {self._loop.time():.0f} s: no step {self.master.version}"
        return f"{when} within {STEP_LIMIT_S:g} s: {self.master.buffer.describe()}; {gate}; servers: {states}"

    def _mark(self) -> _Mark:
        return self._loop.time(), self.fleet.counts(), self.master.counts.copy()

    async def _audit(self) -> list[str]:
        """Let all rollouts end, then check that everything is accounted for."""
        found: list[str] = []
        master = self.master
        await master.manager.call(CloseGate())
        deadline = self._loop.time() + DRAIN_LIMIT_S
        gate, router = self.manager.service.gate, self.manager.service.router
        decisions = self.manager.decisions
        colocated_servers = [record for record in decisions.servers if record.index in decisions.colocated]
        while self._loop.time() < deadline and (  # noqa: ASYNC110 (virtual time)
            gate.counts().running or any(record.state is not ServerState.SERVING for record in colocated_servers)
        ):
            await asyncio.sleep(1.0)
        if running := gate.counts().running:
            found.append(f"{running} rollouts still run {DRAIN_LIMIT_S:g} s after the gate was closed")
        await asyncio.sleep(5.0)
        await master.drain()
        counts = gate.counts()
        if not counts.balanced:
            found.append(f"the counts do not balance: {counts}")
        if counts.trained != self.setup.steps * self.setup.batch:
            found.append(f"the gate counts {counts.trained} trained, not {self.setup.steps * self.setup.batch}")
        if counts.finished_untrained != len(master.buffer):
            found.append(f"the gate counts {counts.finished_untrained} finished, the buffer has {len(master.buffer)}")
        placed = sum(view.sequences for view in router.servers)
        if placed:
            found.append(f"{placed} sequences are placed on servers where nothing runs")
        if self.fleet.sequences:
            found.append(f"{self.fleet.sequences} answers run on servers, and no rollout waits for them")
        if master.counts.beyond and self.setup.on_stale != OnStale.mask:
            found.append(f"{master.counts.beyond} tokens older than η={self.setup.eta} were trained")
        if not self.setup.faults.any:
            for record in decisions.servers:
                if record.state is not ServerState.SERVING or record.version != master.version:
                    found.append(
                        f"server {record.index} is {record.state} at {record.version}, not serving {master.version}"
                    )
        return found

    def _outcome(self, first: _Mark, last: _Mark, faults: list[str]) -> Outcome:
        (begun, worked, before), (ended, work, after) = first, last
        setup, elapsed = self.setup, ended - begun
        servers_s = elapsed * setup.servers
        served = work.since(worked)
        busy, trained = served.busy_s / servers_s, (after.train_s - before.train_s) / elapsed
        steps = len(after.steps) - len(before.steps)
        staleness, answers = after.staleness - before.staleness, after.answers - before.answers
        return Outcome(
            step_s=elapsed / steps,
            wait_s=(after.wait_s - before.wait_s) / steps,
            generation_idle=1.0 - busy,
            training_idle=1.0 - trained,
            tokens_per_s=served.generated * setup.grain / elapsed,
            trained_per_s=staleness.total() * setup.grain / elapsed,
            staleness=staleness,
            long_share=answers[True] / answers.total(),
            interrupted=served.interrupted / served.generated if served.generated else 0.0,
            deaths=self.faults.deaths,
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
