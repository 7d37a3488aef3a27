"""The MasterWorker's calls to the gate about the run's rollouts, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from asyncrl.api.trajectory import GENERATED, POLICY_SERVERS
from asyncrl.comm.ended_rollouts import PolicyTokens, RolloutCounts
from asyncrl.comm.http_client import HttpRefused
from asyncrl.comm.waits import Backoff
from asyncrl.data.prompt_queue import UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.master.data import sample_buffer as module
from asyncrl.master.data.sample_buffer import CountsError, Reports, SampleBuffer, TrainBatch, received, trained_rollout
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord
from tests.statuses import status_reply

WHILE_STOPPING_S = 1 / 32
"""Instead of `ANSWER_S`."""


class Ranks:
    def __init__(self, reported: list[str]) -> None:
        self.reported, self.discarded, self.has = reported, list[str](), list[RolloutRecord]()

    async def held(self) -> list[RolloutRecord]:
        self.reported.append("held")
        return self.has

    def start(self) -> None:
        self.reported.append("start")

    async def discard(self, records: list[RolloutRecord], limit_s: float) -> None:
        self.discarded += [record.rollout_id for record in records]


class Manager:
    """Answers each call after `waits`, if that is set, or with the first of `errors`."""

    def __init__(self) -> None:
        self.reported = list[str]()
        self.begun = list[m.RunBegin]()
        self.reports = list[tuple[int, list[str], list[m.DroppedRollout]]]()
        self.replies = list[m.ConsumedReply]()
        self.errors = list[Exception]()
        self.waits: Callable[[], Awaitable[Any]] | None = None

    async def _answers(self, call: str) -> None:
        self.reported.append(call)
        if self.errors:
            raise self.errors.pop(0)
        if self.waits is not None:
            await self.waits()

    async def call(self, request: m.Request[Any]) -> Any:
        match request:
            case m.RunBegin():
                await self._answers("begin")
                self.begun.append(request)
                return m.Session(0)
            case m.ConsumedReport(version, trained, dropped):
                self.reports.append((version, [each.rollout_id for each in trained], dropped))
                await self._answers("consumed")
                begun = m.GateCheckpoint() if trained else None
                return self.replies.pop(0) if self.replies else reply(checkpoint=begun)
            case m.CloseGate():
                return await self._answers("close")
            case m.EndReport(version):
                await self._answers(f"end {version}")
                return RolloutCounts(7, 4, {}, 3)
            case _:
                return status_reply(idle_s=3.0)


def reply(*, checkpoint: m.GateCheckpoint | None = None, **others: Any) -> m.ConsumedReply:
    return m.ConsumedReply(RolloutCounts(7, 4, {"stale": 3}), checkpoint, **others)


class World:
    """Reports with what they are made of."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.manager, self.buffer, self.stop = Manager(), SampleBuffer(2, 1, OnStale.drop), asyncio.Event()
        self.ranks = Ranks(self.manager.reported)
        parts: list[Any] = [self.manager, self.ranks, self.buffer, self.stop]
        self.reports = Reports(*parts, limit_s=limit_s)

    def drop(self, *orders: int) -> None:
        """The buffer drops rollouts of these orders: they expired."""
        self.buffer.add([record(f"r{order}", order) for order in orders])
        self.buffer.expire(2)


@pytest.fixture
def while_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", WHILE_STOPPING_S)


def record(name: str, order: int, oldest: int = 0) -> RolloutRecord:
    return RolloutRecord(
        name, f"e0-{order}", order, 0, oldest, {oldest: 2}, (2, 3), (1, 1), (1.0, 0.0), (False, False), (0, 1)
    )


def step(*names: str, version: int = 0) -> TrainBatch:
    return TrainBatch(version, 0, tuple(record(name, order) for order, name in enumerate(names)))


def test_at_the_start_of_a_run_nothing_is_counted_and_no_prompt_is_used() -> None:
    reports = World().reports
    assert reports.counts == RolloutCounts()
    assert reports.checkpoint.used is not None, "a checkpoint that is made of it can be read"
    assert set(UsedPrompts.from_json(reports.checkpoint.used)) == set()


def test_a_resumed_run_counts_what_was_trained_and_dropped_before() -> None:
    reports = World().reports
    checkpoint = m.GateCheckpoint(used=UsedPrompts(["e0-1"]).to_json(), dropped={"stale": 2, "timeout": 1, "failed": 0})
    reports.restore(4, checkpoint)
    assert reports.counts == RolloutCounts(7, 4, {"stale": 2, "timeout": 1})
    assert reports.checkpoint == checkpoint


def test_a_rollout_of_which_nothing_was_generated_counts_as_of_the_first_version() -> None:
    assert received(record("r", 3, oldest=2)) == m.ReceivedRollout("r", "e0-3", 3, 2, 5)
    assert received(record("r", 3, oldest=-1)).version == 0
    empty = msgspec.structs.replace(record("r", 3), lengths=(0, 0))
    assert received(empty).tokens == 1
    assert received(msgspec.structs.replace(empty, lengths=(1, 0))).tokens == 1


def test_what_the_ledger_says_of_a_trained_rollout_is_what_its_worker_and_the_ranks_counted() -> None:
    alone = trained_rollout(record("r", 3, oldest=2))
    assert alone == m.TrainedRollout("r", "e0-3", 3, {2: 2}, episodes=2, samples=2, reward=0.5)
    metrics = {
        f"{POLICY_SERVERS}past/oldest_version": 1.0,
        f"{POLICY_SERVERS}past/newest_version": 2.0,
        f"{GENERATED}actor": 9.0,
        f"{GENERATED}judge": 4.0,
        "agent/turns": 2.0,
    }
    several = RolloutRecord(
        "r", "e0-3", 3, 0, 0, {0: 8}, (6, 3, 2), (5, 2, 1), (1.0, 0.0, 0.5), (False,) * 3, (0, 1, 2), metrics
    )
    several = msgspec.structs.replace(several, groups=("actor", "judge", "judge"))
    reported = trained_rollout(several)
    assert (reported.episodes, reported.samples, reported.reward) == (3, 3, 0.5)
    assert reported.policy_servers == {"past": (1, 2)}
    assert reported.policies == {"actor": PolicyTokens(9, 5, 1), "judge": PolicyTokens(4, 3, 2)}


async def test_a_step_is_reported_with_what_was_dropped_and_brings_the_gates_part_of_the_state() -> None:
    world = World()
    world.drop(8)
    checkpoint = m.GateCheckpoint(used=UsedPrompts(["e0-0", "e0-1", "e0-5"]).to_json(), line=40)
    world.manager.replies = [reply(checkpoint=checkpoint, idle_s=2.0, versions_in_use=[4])]
    await world.reports.trained(step("r0", "r1"))
    assert world.manager.reports == [(1, ["r0", "r1"], [m.DroppedRollout("r8", "stale")])]
    reports = world.reports
    assert (reports.checkpoint, reports.counts.trained) == (checkpoint, 4)
    assert (reports.idle_s, reports.versions_in_use, reports.counts.dropped) == (2.0, {4}, {"stale": 3})
    assert world.ranks.discarded == ["r8"]


async def test_what_the_buffer_drops_is_reported_once_and_freed_at_the_ranks() -> None:
    world = World()
    await world.reports.dropped(3)
    assert world.manager.reported == [], "nothing is due"
    world.drop(1)
    await world.reports.dropped(3)
    await world.reports.dropped(3)
    assert world.manager.reports == [(3, [], [m.DroppedRollout("r1", "stale")])]
    assert world.ranks.discarded == ["r1"]
    assert world.reports.checkpoint.line == 0, "a checkpoint is of a step"


async def test_what_is_dropped_during_a_report_is_reported_at_once_too() -> None:
    """It takes up room at the gate."""
    world = World()
    world.drop(1)

    async def one_more() -> None:
        world.manager.waits = None
        world.drop(2)

    world.manager.waits = one_more
    await world.reports.dropped(3)
    assert [[each.rollout_id for each in dropped] for _, _, dropped in world.manager.reports] == [["r1"], ["r2"]]
    assert world.ranks.discarded == ["r1", "r2"]


async def test_drops_that_were_not_acknowledged_stay_for_the_next_report() -> None:
    world = World()
    world.drop(1)
    world.manager.errors = [ManagerGone("no answer")]
    with pytest.raises(ManagerGone):
        await world.reports.dropped(3)
    assert world.ranks.discarded == [], "the manager may not know that they are dropped"
    world.drop(2)
    await world.reports.trained(step("r8", "r9", version=3))
    assert [[each.rollout_id for each in dropped] for _, _, dropped in world.manager.reports] == [["r1"], ["r1", "r2"]]
    assert world.ranks.discarded == ["r1", "r2"]


async def test_the_manager_gets_the_checkpoint_and_what_the_ranks_have_once_before_it_says_what_counts() -> None:
    world = World()
    checkpoint = m.GateCheckpoint(dropped={"stale": 2}, line=40)
    world.reports.restore(8, checkpoint)
    world.ranks.has = [record("r2", 2, oldest=2), record("r1", 1)]
    world.manager.errors = [ConnectionError()]
    with pytest.raises(ConnectionError):
        await world.reports.begin(4)
    assert world.manager.reported == ["held", "begin"], "the ranks are not polled before the manager says what counts"
    await world.reports.begin(4)
    await world.reports.begin(4)
    assert world.manager.reported[2:] == ["held", "begin", "start"]
    (begun,) = world.manager.begun
    assert (begun.version, begun.checkpoint) == (4, checkpoint)
    assert [each.rollout_id for each in begun.received] == ["r2", "r1"]


async def test_a_status_is_asked_for_without_a_report() -> None:
    world = World()
    await world.reports.look()
    assert world.reports.idle_s == 3.0
    assert world.manager.reported == []


async def test_the_counts_are_closed_in_order_also_where_the_beginning_did_not_come_that_far() -> None:
    world = World()
    world.drop(1)
    await world.reports.end(3)
    assert world.manager.reported == ["held", "begin", "start", "close", "consumed", "end 3"]
    assert world.reports.counts == RolloutCounts(7, 4, {}, 3)


@pytest.mark.usefixtures("while_stopping")
async def test_a_run_that_was_not_stopped_waits_as_long_for_its_last_counts_as_for_any_sign_of_life() -> None:
    """The brain and a worker may die as the run ends: the next manager's gate is shut for the worker's lease."""

    async def after_more_than_the_wait_of_a_stop() -> None:
        await asyncio.sleep(2 * WHILE_STOPPING_S)

    world = World()
    world.manager.waits = after_more_than_the_wait_of_a_stop
    await world.reports.end(3)
    world = World(limit_s=WHILE_STOPPING_S / 2)
    world.manager.waits = after_more_than_the_wait_of_a_stop
    with pytest.raises(CountsError, match="did not account for the rollouts"):
        await world.reports.end(3)


CALLS: dict[str, Callable[[Reports], Awaitable[object]]] = {
    "trained": lambda reports: reports.trained(step("r0", "r1")),
    "dropped": lambda reports: reports.dropped(0),
    "end": lambda reports: reports.end(0),
}


@pytest.mark.usefixtures("while_stopping")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stopped", ["before", "meanwhile"])
async def test_a_stop_request_leaves_a_silent_manager_a_short_time_for_each_answer(call: str, stopped: str) -> None:
    world, asked = World(), asyncio.Event()
    await world.reports.begin(0)
    world.drop(1)

    async def silent() -> None:
        asked.set()
        await asyncio.Event().wait()

    world.manager.waits = silent
    if stopped == "before":
        world.stop.set()
    calling = asyncio.ensure_future(CALLS[call](world.reports))
    await asked.wait()
    world.stop.set()
    async with asyncio.timeout(world.reports._limit_s / 2):
        with pytest.raises(CountsError if call == "end" else TimeoutError):
            await calling


@pytest.mark.parametrize("call", CALLS)
async def test_an_answer_that_comes_soon_after_a_stop_request_counts(call: str) -> None:
    world = World()
    await world.reports.begin(0)
    world.drop(1)

    async def while_a_stop_is_requested() -> None:
        world.stop.set()
        for _ in range(10):
            await asyncio.sleep(0)

    world.manager.waits = while_a_stop_is_requested
    await CALLS[call](world.reports)
    assert world.reports.counts.submitted == 7


async def test_a_manager_that_waits_for_workers_is_called_for_longer_than_one_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`SystemConfig.silence_s` may be longer than the time for which calls to a silent manager are repeated."""
    monkeypatch.setattr("asyncrl.manager.client._BACKOFF", Backoff(0.05, 0.05))
    client = ManagerClient("http://manager", "master_worker/0", None, retry_s=0.2)
    statuses = [503] * 8

    async def call(method: str, url: str, request: object, **options: object) -> m.ConsumedReply:
        if statuses:
            raise HttpRefused(url, statuses.pop(), b"")
        return reply(idle_s=7.0)

    cast(Any, client)._http.call = call
    assert (await client.call(m.ConsumedReport(1))).idle_s == 7.0
