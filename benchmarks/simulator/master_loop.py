"""The master of a simulated run: its step in the order of `asyncrl.master.train_loop.TrainLoop`.

Real: the buffer, the collector, which asks the manager what counts, and the turns with guests. Simulated: the time that
a step and its publishing take.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from asyncrl.comm.ended_rollouts import RolloutCounts
from asyncrl.comm.waits import HOLD_S, LOOK_S
from asyncrl.manager.fleet.servers import Target
from asyncrl.manager.messages import TrainedRollout
from asyncrl.master.data.batches import DeviceTurns
from asyncrl.master.data.collector import Collector, trained_rollout
from asyncrl.master.data.sample_buffer import Drop, SampleBuffer, TrainBatch
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import Discard, RolloutRecord
from simulator.device_turns import Announced
from simulator.host.clients import SimulatedManagerClient
from simulator.host.processes import Processes
from simulator.setup import LONG, Setup
from simulator.trainer import DataHead

MakeTurns = Callable[[Announced, SimulatedManagerClient, SampleBuffer, Collector], DeviceTurns]
"""Builds the turns of the trainer and its guests."""


@dataclass(slots=True)
class TrainCounts:
    """Trained tokens and answers, and the seconds that training took and waited.

    Attributes:
        staleness: trained tokens by their age in versions.
        beyond: tokens older than η, which carry no loss with `on_stale=mask`.
        answers: trained answers, by whether they have `LONG` tokens.
        train_s, wait_s: seconds of training and publishing, and of waiting for rollouts.
        steps: seconds of each step.
    """

    staleness: Counter[int] = field(default_factory=Counter)
    beyond: int = 0
    answers: Counter[bool] = field(default_factory=Counter)
    train_s: float = 0.0
    wait_s: float = 0.0
    steps: list[float] = field(default_factory=list)

    def add_batch(self, batch: TrainBatch, eta: int, grain: int) -> None:
        """Count the tokens and answers of a trained batch."""
        for record in batch.records:
            for version, count in record.version_tokens.items():
                if (age := batch.version - version) <= eta:
                    self.staleness[age] += count
                else:
                    self.beyond += count
            self.answers.update(tokens * grain >= LONG for tokens in record.generated)

    def copy(self) -> TrainCounts:
        """Return the counts as of now."""
        return replace(self, staleness=self.staleness.copy(), answers=self.answers.copy(), steps=list(self.steps))


class Reports:
    """Reports of trained and dropped rollouts to the manager, and its replies.

    Attributes:
        trained: trained rollouts that are not reported yet.
        counts: the gate's counters in the newest reply.
    """

    def __init__(self, manager: SimulatedManagerClient, head: DataHead, buffer: SampleBuffer) -> None:
        self._manager, self._head, self._buffer = manager, head, buffer
        self._drops: list[Drop] = []
        self.trained: list[TrainedRollout] = []
        self.counts = RolloutCounts()

    async def send(self, version: int) -> None:
        """Report trained and dropped rollouts, if there are any."""
        self._drops += self._buffer.pop_drops()
        drops, trained = self._drops, self.trained
        if not trained and not drops:
            return
        self._drops, self.trained = [], []
        reply = await self._manager.consumed(version, trained, [drop.message for drop in drops])
        self.counts = reply.counts
        if drops:
            await self._head.call(Discard(tuple(drop.record.rollout_id for drop in drops)), timeout_s=1.0)


class MasterLoop:
    """The master, its ranks' time and their receiving end.

    Args:
        setup: the run's setup.
        on: processes of the run's host.
        head: receives the trajectories.
        manager: the client for its reports.
        announce: called with each new version.
        turns: builds the turns with guests.

    Attributes:
        version: completed train steps.
        counts: totals of the training so far.
        reports: the reports to the manager.
    """

    def __init__(
        self,
        setup: Setup,
        on: Processes,
        head: DataHead,
        manager: SimulatedManagerClient,
        announce: Callable[[Target], None],
        turns: MakeTurns,
    ) -> None:
        self._setup, self._on, self._announce = setup, on, announce
        self._trainer = setup.trainer.coarse(setup.grain)
        self.head, self.manager = head, manager
        self.buffer = SampleBuffer(setup.batch, setup.eta, setup.on_stale)
        self.collector = Collector([head], self.buffer, manager)  # type: ignore[list-item]
        self._announcer = Announced()
        self.turns = turns(self._announcer, manager, self.buffer, self.collector)
        self.reports = Reports(manager, head, self.buffer)
        self.version = 0
        self.counts = TrainCounts()

    async def step(self) -> None:
        """Take a batch, train on it, publish the version and report the rollouts."""
        now, setup, on = asyncio.get_running_loop().time, self._setup, self._on
        begun = now()
        batch = await self._next_batch()
        has_data = now()
        await self.turns.take(self.version)
        await on.master.work(on.host.master_s / 2)
        tokens = sum(map(self._trained_tokens, batch.records))
        await on.rank.work(self._trainer.step_s(tokens, has_data - begun))
        self.buffer.mark_trained(batch)
        self.version += 1
        self.counts.add_batch(batch, setup.eta, setup.grain)
        self.reports.trained += map(trained_rollout, batch.records)
        await self.head.call(Discard(tuple(record.rollout_id for record in batch.records)), timeout_s=1.0)
        await on.rank.work(self._trainer.publish_s)
        published = now()
        self._announcer.announced = self.version
        self._announce(Target(self.version, f"v{self.version}"))
        await on.master.work(on.host.master_s / 2)
        await self.reports.send(self.version)
        self.counts.wait_s += has_data - begun
        self.counts.train_s += published - has_data
        self.counts.steps.append(now() - begun)

    async def take_rest(self) -> None:
        """Receive the rollouts that have arrived since the last step, and report the expired ones."""
        await self.collector.refresh()
        self.buffer.expire(self.version)
        await self.reports.send(self.version)

    async def close(self) -> None:
        """Close the connections."""
        await self.collector.close()
        await self.manager.close()

    def _trained_tokens(self, record: RolloutRecord) -> int:
        """Return the number of trained tokens; 0 if the rewards of the group are known to be equal."""
        lengths = self._setup.lengths
        if self._setup.in_order and not lengths.is_trained(record.order):
            return 0
        return record.computed_tokens

    async def _next_batch(self) -> TrainBatch:
        while True:
            await self._enough_rollouts()
            if self._setup.on_stale == OnStale.wait:
                while await self.manager.wait_expiring(self.version, 0.0 if self.turns.training else HOLD_S):
                    self.turns.give()
                await self.collector.refresh()
            batch = self.buffer.take(self.version)
            if batch is not None:
                return batch

    async def _enough_rollouts(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            self.buffer.expire(self.version)
            await self.reports.send(self.version)
            missing = self._setup.batch - len(self.buffer)
            if missing > 0 and self.turns.training:
                await self.collector.refresh()
                missing = self._setup.batch - len(self.buffer)
            if missing <= 0:
                return
            lent = await self.turns.lend(missing)
            began, before = now(), self.buffer.received
            with suppress(TimeoutError):
                async with asyncio.timeout(None if lent else LOOK_S):
                    await self.collector.changed(missing)
            self.turns.waited(self.buffer.received - before, now() - began)
