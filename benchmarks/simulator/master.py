"""The master of a simulated run: its step in the order of `asyncrl.master.train_loop.TrainLoop`.

Real: the buffer, the collector, which asks the manager what counts, the ranks' inbox, and the turns with colocated
servers.
Simulated: the time that a step and its publishing take, and the announcement of a turn, which in a run goes by name
resolution.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.api import Trajectory
from asyncrl.colocated.manager import awake, others_in_service
from asyncrl.colocated.master import SharedDevices
from asyncrl.comm.names import TrainerTurn
from asyncrl.comm.request_reply import Done
from asyncrl.comm.waits import HOLD_S, LOOK_S
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.fleet.servers import Target
from asyncrl.manager.messages import (
    ConsumedReport,
    TrainedRollout,
    WaitAsleepReply,
    WaitAsleepRequest,
    WaitExpiringRequest,
)
from asyncrl.master.data.sample_buffer import Collector, SampleBuffer, TrainBatch, trained_rollout
from asyncrl.master.data.stall import StallWatch
from asyncrl.master.data.while_waiting import DeviceTurns
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import Discard, PollBuffer
from asyncrl.trainer.rank.inbox import Inbox
from simulator.setup import LONG, STEP_LIMIT_S, Setup


class DataHead:
    """The ModelWorkers' end for the collector and the pushers: the real inbox, polled in process."""

    def __init__(self, capacity: int) -> None:
        self._arrived = asyncio.Event()
        self.inbox = Inbox(0, capacity, self._arrived.set)

    async def push(self, trajectory: Trajectory) -> None:
        """Deliver a trajectory; return once it is held."""
        self.inbox.put(trajectory, 0.0)

    async def call(self, request: PollBuffer | Discard, *, timeout_s: float) -> Any:
        """Answer the master's call as a ModelWorker does."""
        if isinstance(request, Discard):
            self.inbox.remove(request.rollout_ids)
            return Done()
        with suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_s):
                await self._wait(request.cursor, 1)
            async with asyncio.timeout(request.gather_s):
                await self._wait(request.cursor, request.at_least)
        return self.inbox.poll(request.cursor)

    async def _wait(self, cursor: int, count: int) -> None:
        while self.inbox.arrived_after(cursor) < count:
            self._arrived.clear()
            await self._arrived.wait()


class Turns:
    """The turn announced last, which the manager receives at once, and its answer whether all colocated servers sleep.

    Replaces `asyncrl.colocated.manager` and the key in name resolution between master and manager.
    """

    def __init__(self, decisions: FleetDecisions, runner: FleetRunner) -> None:
        self._decisions, self._runner = decisions, runner
        self._loop = asyncio.get_running_loop()
        self._turn: TrainerTurn | None = None

    def producers_start(self) -> bool:
        """See `NameBoard`; all servers and workers are there from the beginning."""
        return False

    def trainer_turn(self) -> TrainerTurn | None:
        """See `NameBoard`."""
        return self._turn

    def announce_turn(self, turn: TrainerTurn) -> None:
        """See `NameBoard`."""
        self._turn = turn
        self._decisions.colocated.begin(turn)
        self._runner.changed.notify()

    async def call(self, request: WaitAsleepRequest) -> WaitAsleepReply:
        """See `ManagerClient`."""
        deadline = self._loop.time() + request.timeout_s
        while True:
            waits_for = [f"generation server {record.index} ({record.state})" for record in awake(self._decisions)]
            left_s = deadline - self._loop.time()
            if not waits_for or left_s <= 0:
                return WaitAsleepReply(waits_for, others_in_service(self._decisions), self._runner.wake_s)
            await self._runner.changed.wait(left_s)


@dataclass(slots=True)
class Announced:
    """The newest version, of which servers know, and none of which is evaluated. Replaces the `VersionAnnouncer`."""

    announced: int = 0
    evaluating: bool = False
    free_since: float = 0.0


def device_turns(
    setup: Setup,
    decisions: FleetDecisions,
    runner: FleetRunner,
    announcer: Announced,
    manager: Any,
    buffer: SampleBuffer,
    collector: Collector,
) -> DeviceTurns:
    """Return the turns of the trainer and its colocated servers; without colocated servers they take no time."""
    if not setup.colocated_servers:
        return DeviceTurns()
    stop, clock = asyncio.Event(), asyncio.get_running_loop().time
    simulated: Any = Turns(decisions, runner), announcer, clock
    turns, announces, time = simulated
    ahead = (setup.eta + 1) * setup.batch
    stall = StallWatch(STEP_LIMIT_S, time, stop, announces, turns, manager, buffer, collector, ahead, run_dir=Path())
    return SharedDevices(
        turns, turns, stall, announces, stop, setup.colocated_servers, setup.servers - setup.colocated_servers
    )


MakeTurns = Callable[[Announced, ManagerClient, SampleBuffer, Collector], DeviceTurns]
"""Builds the turns of the trainer and its colocated servers."""


@dataclass(slots=True)
class TrainCounts:
    """Trained tokens and answers; seconds of training and publishing, of waiting for rollouts, of each step."""

    staleness: Counter[int] = field(default_factory=Counter)
    """Trained tokens by their age in versions."""
    beyond: int = 0
    """Tokens older than η, which carry no loss with `on_stale=mask`."""
    answers: Counter[bool] = field(default_factory=Counter)
    """Trained answers, by whether they have `LONG` tokens."""
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


class MasterLoop:
    """The master, its ranks' time and their receiving end `head`; `announce` is called with each version."""

    def __init__(
        self, setup: Setup, head: DataHead, manager: ManagerClient, announce: Callable[[Target], None], turns: MakeTurns
    ) -> None:
        self._setup, self._announce = setup, announce
        self._trainer = setup.trainer.coarse(setup.grain)
        self.head, self.manager = head, manager
        self.buffer = SampleBuffer(setup.batch, setup.eta, setup.on_stale)
        self.collector = Collector([head], self.buffer, manager)  # type: ignore[list-item]
        self._announcer = Announced()
        self.turns = turns(self._announcer, manager, self.buffer, self.collector)
        self._trained: list[TrainedRollout] = []
        """Those that are not reported yet."""
        self.version = 0
        self.counts = TrainCounts()

    async def step(self) -> None:
        """Take a batch, train on it, publish the version and report the rollouts."""
        loop, setup = asyncio.get_running_loop(), self._setup
        now, begun = loop.time, loop.time()
        batch = await self._next_batch()
        has_data = now()
        await self.turns.take(self.version)
        tokens = sum(record.computed_tokens for record in batch.records)
        await asyncio.sleep(self._trainer.step_s(tokens))
        self.buffer.mark_trained(batch)
        self.version += 1
        self.counts.add_batch(batch, setup.eta, setup.grain)
        self._trained += map(trained_rollout, batch.records)
        await self.head.call(Discard(tuple(record.rollout_id for record in batch.records)), timeout_s=1.0)
        await asyncio.sleep(self._trainer.publish_s)
        published = now()
        self._announcer.announced = self.version
        loop.call_soon(self._announce, Target(self.version, f"v{self.version}"))
        await self._report()
        self.counts.wait_s += has_data - begun
        self.counts.train_s += published - has_data
        self.counts.steps.append(now() - begun)

    async def drain(self) -> None:
        """Receive the rollouts that have arrived since the last step, and report the expired ones."""
        await self.collector.refresh()
        self.buffer.expire(self.version)
        await self._report()

    async def close(self) -> None:
        """Close the connections."""
        await self.collector.close()
        await self.manager.close()

    async def _report(self) -> None:
        """Report trained and dropped rollouts, if there are any."""
        drops, trained = self.buffer.drops, self._trained
        if trained or drops:
            self.buffer.drops, self._trained = [], []
            await self.manager.call(ConsumedReport(self.version, trained, [drop.message for drop in drops]))
        if drops:
            await self.head.call(Discard(tuple(drop.record.rollout_id for drop in drops)), timeout_s=1.0)

    async def _next_batch(self) -> TrainBatch:
        while True:
            await self._enough_rollouts()
            if self._setup.on_stale == OnStale.wait:
                while (await self.manager.call(self._expiring())).running:
                    self.turns.give()
                await self.collector.refresh()
            batch = self.buffer.take(self.version)
            if batch is not None:
                return batch

    def _expiring(self) -> WaitExpiringRequest:
        return WaitExpiringRequest(self.version, 0.0 if self.turns.training else HOLD_S)

    async def _enough_rollouts(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            self.buffer.expire(self.version)
            await self._report()
            missing = self._setup.batch - len(self.buffer)
            if missing > 0 and self.turns.training:
                await self.collector.refresh()
                missing = self._setup.batch - len(self.buffer)
            if missing <= 0:
                return
            woken = await self.turns.wake(missing)
            began, before = now(), self.buffer.received
            with suppress(TimeoutError):
                async with asyncio.timeout(None if woken else LOOK_S):
                    await self.collector.changed(missing)
            self.turns.waited(self.buffer.received - before, now() - began)
