"""State that lives as long as a run does not grow with it: twelve thousand rollouts are played, and everything is
measured.

Measured is every collection that can be reached from the state machines, whatever it is called: one that is added later
is measured too. What may grow is named, with its reason, in `GROWS`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from asyncrl.comm.ended_rollouts import RunSettings
from asyncrl.comm.push_pull import Outbox, Push
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager import service
from asyncrl.manager.rollouts import rollout_state, staleness_gate
from asyncrl.manager.rollouts.pacing import DeadlinePacing
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.service import ManagerService
from asyncrl.master.data import sample_buffer as buffers
from asyncrl.master.data.sample_buffer import SampleBuffer, received, trained_rollout
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord

ROLLOUTS, WARM_UP = 12_000, 3_000
ROWS, WORKERS, B, ETA, AT_ONCE = 1_000, 4, 32, 2, 24
REMEMBERED = 128
"""Number of recent ids that rings keep here, so that they are full after the warm-up; in a run they are larger."""
SLACK = 128
GROWS = {
    "RolloutState.used": "a bit for each prompt used: what a checkpoint has to know",
}
CONTAINERS = (dict, set, list, deque, OrderedDict, bytearray, np.ndarray)


def sizes(name: str, thing: Any, seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """The lengths of all collections below `thing`, by the attribute that holds them."""
    seen = set() if seen is None else seen
    if id(thing) in seen or name in GROWS:
        return
    seen.add(id(thing))
    if isinstance(thing, CONTAINERS):
        yield name, len(thing)
        if isinstance(thing, (bytearray, np.ndarray)):
            return
        for value in list(thing.values() if isinstance(thing, dict) else thing)[-50:]:
            yield from sizes(f"{name}[]", value, seen)
        return
    kind = type(thing)
    if not kind.__module__.startswith("asyncrl."):
        return
    slots = (slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ()))
    for attribute in [*getattr(thing, "__dict__", ()), *slots]:
        if hasattr(thing, attribute):
            yield from sizes(f"{kind.__name__}.{attribute}", getattr(thing, attribute), seen)


def largest(*things: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for thing in things:
        for name, size in sizes(type(thing).__name__, thing):
            found[name] = max(size, found.get(name, 0))
    return found


class Run:
    """Workers, manager, trainer and senders, with failures, returns, lost workers and stale rollouts among the rest."""

    def __init__(self, folder: Path) -> None:
        self.chance = random.Random(3)
        self.now = 0.0
        self.service = ManagerService(
            batch_size=B,
            max_staleness=ETA,
            routing="prefix_affine",
            lease_s=60.0,
            pacing=DeadlinePacing(B, ETA),
            clock=lambda: self.now,
            order=DataOrder(ROWS, 0),
            first=m.RequestSize(3, 4, 2),
            ledger=Ledger(folder, RunSettings(B, ETA, str(OnStale.drop), WORKERS, 0)),
        )
        self.service.router.update(0, "http://a", 0, routable=True)
        self.service.router.update(1, "http://b", 0, routable=True)
        self.service.await_workers({})
        self.buffer = SampleBuffer(B, ETA, OnStale.drop)
        self.ids: list[list[str]] = [[] for _ in range(WORKERS)]
        self.running: list[dict[str, m.GrantedRollout]] = [{} for _ in range(WORKERS)]
        self.outbox = Outbox(high_water=64, resend_after_s=5.0)
        self.outbox.set_peers(["x", "y"])
        self.version = self.made = self.incarnation = 0
        self.refused = 0
        self.inbox: list[RolloutRecord] = []

    @property
    def machines(self) -> tuple[Any, ...]:
        return self.service, self.buffer, self.outbox

    async def play(self, until: int) -> None:
        await self.service.begin_run(m.RunBegin())  # has an effect once
        while self.made < until:
            self.now += 1.0
            for index in range(WORKERS):
                await self.turn(index)
            await self.train()
            if self.chance.random() < 0.01:
                self.service.worker_died("rollout_worker/0")
            if self.chance.random() < 0.01:
                self.incarnation += 1
                self.service.incarnation_seen("rollout_worker/1", self.incarnation)
                self.ids[1].clear()
                self.running[1].clear()
        await self.service.consumed(m.ConsumedReport(self.version))  # the disk has the ledger's lines

    async def turn(self, index: int) -> None:
        who: dict[str, Any] = {
            "worker": f"rollout_worker/{index}",
            "incarnation": self.incarnation if index == 1 else 0,
        }
        ids, running = self.ids[index], self.running[index]
        finished = [self.finish(running.pop(name)) for name in list(running) if self.chance.random() < 0.5]
        if self.chance.random() < 0.3:
            await self.collect()  # before the worker reports the ends
        while len(ids) + len(running) < AT_ONCE:
            self.made += 1
            ids.append(f"r{self.made}")
        reply = await self.service.allocate_rollout(m.AllocateRequest(**who, finished=finished, rollouts=list(ids)))
        for granted in reply.granted:
            ids.remove(granted.rollout_id)
            running[granted.rollout_id] = granted
        for name in reply.gone:
            ids.remove(name)
        asks = [m.RouteRequest(1, 2, 1, request_id=f"{name}/2", rollout_id=name, affinity=name) for name in running]
        await self.service.schedule_request(m.ScheduleRequest(**who, requests=asks))

    def finish(self, granted: m.GrantedRollout) -> m.FinishedRollout:
        name = granted.rollout_id
        fate = self.chance.random()
        if fate < 0.2:
            again = fate < 0.15
            return m.FinishedRollout(name, False, "zero_variance", return_prompt=again, as_next_attempt=again)
        entry = Push(name, cast(Any, None), math.inf, cast(Any, None))
        self.outbox.add(entry)
        self.outbox.take(("x",), self.now)
        if fate < 0.9:
            self.outbox.lost("x")
            self.outbox.take(("y",), self.now)
        self.outbox.acked(entry.seq)
        sizes: dict[str, Any] = {
            "lengths": (2,),
            "generated": (1,),
            "rewards": (1.0,),
            "truncated": (False,),
            "episodes": (1,),
        }
        oldest = max(0, granted.version - self.chance.choice((0, 0, 0, 3)))
        tokens: dict[str, Any] = {"oldest_version": oldest, "version_tokens": {oldest: 1}}
        of: dict[str, Any] = {"rollout_id": name, "prompt_id": granted.prompt_id, "order": granted.order, "head": 0}
        self.inbox.append(RolloutRecord(**of, **tokens, **sizes))
        return m.FinishedRollout(name, True)

    async def collect(self) -> None:
        records, self.inbox = self.inbox, []
        refused = (await self.service.received(m.ReceivedReport(list(map(received, records))))).refused
        self.buffer.add(record for record in records if record.rollout_id not in refused)
        self.refused += len(refused)

    async def train(self) -> None:
        await self.collect()
        while (batch := self.buffer.take(self.version)) is not None:
            self.buffer.mark_trained(batch)
            self.version += 1
            await self.report([trained_rollout(record) for record in batch.records])
        await self.report([])

    async def report(self, trained: list[m.TrainedRollout]) -> None:
        dropped = [drop.message for drop in self.buffer.drops]
        self.buffer.drops.clear()
        await self.service.consumed(m.ConsumedReport(self.version, trained, dropped))
        for index in (0, 1):
            self.service.router.update(index, f"http://{'ab'[index]}", self.version, routable=True)
        self.service.routes_changed(self.version)


def test_no_state_machine_of_the_control_plane_grows_with_the_rollouts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (service, staleness_gate, buffers, rollout_state):
        monkeypatch.setattr(module, "ids_remembered", lambda *_: REMEMBERED)
    run = Run(tmp_path)

    async def play() -> tuple[dict[str, int], dict[str, int]]:
        await run.play(WARM_UP)
        before = largest(*run.machines)
        await run.play(ROLLOUTS)
        return before, largest(*run.machines)

    before, after = asyncio.run(play())
    assert run.version > ROLLOUTS // B // 3
    assert run.refused, "some came after their workers were given up"
    grown = {name: (before.get(name, 0), size) for name, size in after.items() if size > before.get(name, 0) + SLACK}
    assert not grown
    assert {
        "PromptQueue.back",
        "Router._placements",
        "RecentIds._generations[]",
        "LedgerFiles._appended",
    } <= after.keys()
