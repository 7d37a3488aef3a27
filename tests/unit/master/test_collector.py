"""The collector: polls that go on during training, repeats, copies, what does not count, refreshes and failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from msgspec import structs

from asyncrl.comm.request_reply import Done, RequestTimeout
from asyncrl.comm.waits import BURST_S, CALL_S, GATHER_S, HOLD_S
from asyncrl.manager.messages import ReceivedReply, ReceivedReport
from asyncrl.master.data.sample_buffer import Collector, SampleBuffer
from asyncrl.trainer.messages import Discard, PollBuffer, PolledBuffer, RolloutRecord


class Workers:
    """Hold polls open until `wake`; what they received is told from the cursor on."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.received: list[list[RolloutRecord]] = [[] for _ in range(count)]
        self.wake = [asyncio.Event() for _ in range(count)]
        self.polls: list[tuple[int, int, float]] = []
        self.asked: list[int] = []
        self.limits: list[float] = []
        self.discarded: list[tuple[int, str]] = []
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter([Worker(self, index) for index in range(self.count)])


class Worker:
    """One of them."""

    def __init__(self, workers: Workers, index: int) -> None:
        self.all, self.index = workers, index

    async def call(self, request: PollBuffer | Discard, *, timeout_s: float) -> PolledBuffer | Done:
        workers, received = self.all, self.all.received[self.index]
        workers.limits.append(timeout_s)
        if isinstance(request, Discard):
            workers.discarded += [(self.index, rollout_id) for rollout_id in request.rollout_ids]
            return Done()
        workers.polls.append((self.index, request.cursor, request.timeout_s))
        workers.asked.append(request.at_least)
        if request.timeout_s:
            await workers.wake[self.index].wait()
            workers.wake[self.index].clear()
        if workers.failure is not None:
            raise workers.failure
        return PolledBuffer(len(received), tuple(received[request.cursor :]))


def record(order: int, worker: int = 0) -> RolloutRecord:
    return RolloutRecord(
        f"r{order}", f"e0-{order}", order, worker, 0, {0: 4}, (4, 4), (2, 2), (0.0, 1.0), (False, True), (0, 1)
    )


class Gate:
    """The manager, which does not count the rollouts that it gave up."""

    def __init__(self, *given_up: str) -> None:
        self.given_up, self.reported = given_up, list[str]()

    async def call(self, report: ReceivedReport) -> ReceivedReply:
        self.reported += [each.rollout_id for each in report.rollouts]
        await asyncio.sleep(0)
        return ReceivedReply([each.rollout_id for each in report.rollouts if each.rollout_id in self.given_up])


def collector_of(workers: Workers | list[Worker], buffer: SampleBuffer, *given_up: str) -> tuple[Collector, Gate]:
    gate = Gate(*given_up)
    return Collector(cast(Any, list(workers)), buffer, cast(Any, gate)), gate


class Silent(Worker):
    """Does not answer the first calls in time."""

    failures = 2

    async def call(self, request: PollBuffer | Discard, *, timeout_s: float) -> PolledBuffer | Done:
        if self.failures:
            self.failures -= 1
            raise RequestTimeout("no answer")
        return await super().call(request, timeout_s=timeout_s)


async def rounds(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110  # what is waited for is the loop itself
            await asyncio.sleep(0)


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_burst_is_told_in_few_polls_and_in_more_while_a_step_waits(awaited: bool) -> None:
    workers, buffer = Workers(1), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    if awaited:
        collector._awaited.set()
    pace_s = BURST_S if awaited else GATHER_S
    begun = time.monotonic()
    collector.start()
    for order in range(50):
        workers.received[0].append(record(order))
        workers.wake[0].set()
        await rounds(5)
    assert len(workers.polls) <= 2 + (time.monotonic() - begun) / pace_s
    await collector.refresh()
    assert len(buffer) == 50
    await collector.close()


async def test_records_reach_the_buffer_and_wake_who_waits() -> None:
    workers, buffer = Workers(2), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    collector.start()
    waiting = asyncio.create_task(collector.changed(missing=1))
    await rounds()
    assert not waiting.done()
    workers.received[1].append(record(0, worker=1))
    workers.wake[1].set()
    await waiting
    assert len(buffer) == 1
    assert (collector.generated_tokens, collector.generated_samples) == (4, 2)
    await until(lambda: workers.polls[-1][:2] == (1, 1))
    await collector.close()


async def test_who_waits_for_many_has_each_head_gather_its_share() -> None:
    workers, buffer = Workers(2), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    collector.start()
    await rounds()
    assert workers.asked == [1, 1], "nobody waits"
    waiting = asyncio.create_task(collector.changed(missing=9))
    await rounds()
    workers.received[1].append(record(0, worker=1))
    workers.wake[1].set()
    await waiting
    again = asyncio.create_task(collector.changed(missing=8))
    await until(lambda: len(workers.asked) == 3)
    assert workers.asked[2] == 4
    again.cancel()
    await collector.close()


async def test_a_refresh_sees_what_the_open_poll_has_not_told() -> None:
    workers, buffer = Workers(2), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    collector.start()
    await rounds()
    workers.received[0].append(record(0))
    workers.received[1].append(record(1, worker=1))
    await collector.refresh()
    assert len(buffer) == 2
    await until(lambda: sorted(poll[:2] for poll in workers.polls[-2:]) == [(0, 1), (1, 1)])
    assert all(hold for _, _, hold in workers.polls[-2:])
    await collector.close()


async def test_a_second_copy_is_freed_at_the_worker_that_holds_it() -> None:
    workers, buffer = Workers(2), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    workers.received[0].append(record(0))
    collector.start()
    await collector.refresh()
    workers.received[1].append(record(0, worker=1))
    await collector.refresh()
    assert workers.discarded == [(1, "r0")]
    assert set(workers.limits) == {CALL_S, HOLD_S + CALL_S}, "the worker need not hold it"
    assert collector.generated_tokens == 4
    await collector.close()


async def test_what_a_given_up_worker_delivers_late_is_freed_and_neither_counted_nor_trained() -> None:
    workers, buffer = Workers(2), SampleBuffer(1, 0, "drop")
    collector, gate = collector_of(workers, buffer, "r0", "r5")
    collector.start()
    waiting = asyncio.create_task(collector.changed(missing=1))
    workers.received[1].append(record(0, worker=1))
    await collector.refresh()
    assert (gate.reported, workers.discarded) == (["r0"], [(1, "r0")])
    assert (len(buffer), buffer.received, collector.generated_tokens, collector.generated_samples) == (0, 0, 0, 0)
    await rounds()
    assert not waiting.done(), "nothing came that a step could train"
    workers.received[0] += [structs.replace(record(0), rollout_id="again"), record(5)]
    await collector.refresh()
    await waiting
    assert [each.rollout_id for each in buffer.live()] == ["again"], "its prompt was played again"
    assert (collector.generated_tokens, collector.generated_samples) == (4, 2)
    assert workers.discarded == [(1, "r0"), (0, "r5")]
    await collector.close()


async def test_what_the_heads_hold_is_told_once_and_comes_again_when_the_manager_says_what_counts() -> None:
    workers, buffer = Workers(2), SampleBuffer(1, 0, "drop")
    collector, gate = collector_of(workers, buffer, "r1")
    workers.received[0].append(record(0))
    workers.received[1] += [record(1, worker=1), record(2, worker=1), record(0, worker=1)]
    assert sorted(each.rollout_id for each in await collector.held()) == ["r0", "r1", "r2"]
    assert (gate.reported, len(buffer)) == ([], 0), "nothing is asked or trained before the manager has begun"
    del workers.received[1][-1]
    collector.start()
    await collector.refresh()
    assert sorted(gate.reported) == ["r0", "r1", "r2"]
    assert [each.rollout_id for each in buffer.live()] == ["r0", "r2"]
    assert workers.discarded == [(1, "r1")]
    await collector.close()


async def test_each_wait_is_for_another_arrival_and_afterwards_a_poll_is_for_one_rollout() -> None:
    workers, buffer = Workers(1), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    collector.start()
    await rounds()
    for order in range(2):
        waiting = asyncio.create_task(collector.changed(missing=3))
        await rounds()
        assert not waiting.done()
        workers.received[0].append(record(order))
        workers.wake[0].set()
        await waiting
    await until(lambda: len(workers.asked) == 3)
    await rounds()
    assert workers.asked == [1, 3, 1], "three are missing as the second poll begins, and nobody waits as the third does"
    await collector.close()
    assert len(asyncio.all_tasks()) == 1
    collector.check()


async def test_a_poll_may_be_held_and_any_other_call_is_answered_within_a_limit() -> None:
    workers, buffer = Workers(1), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    collector.start()
    await rounds()
    await collector.refresh()
    await rounds()
    assert workers.limits == [HOLD_S + CALL_S, CALL_S, HOLD_S + CALL_S]
    assert [hold for *_, hold in workers.polls] == [HOLD_S, 0.0, HOLD_S]
    await collector.close()


async def test_rollouts_are_freed_with_one_call_to_each_head_that_holds_some() -> None:
    workers, buffer = Workers(3), SampleBuffer(4, 0, "drop")
    collector, _ = collector_of(workers, buffer)
    await collector.discard([record(0, worker=2), record(1), record(2, worker=2)], limit_s=3.0)
    assert workers.discarded == [(0, "r1"), (2, "r0"), (2, "r2")]
    assert workers.limits == [3.0, 3.0]


async def test_a_look_raises_the_error_that_ended_the_polls() -> None:
    workers = Workers(2)
    collector, _ = collector_of(workers, SampleBuffer(4, 0, "drop"))
    collector.start()
    await rounds()
    collector.check()
    workers.failure = ConnectionError("model_worker/1 is gone")
    workers.wake[1].set()
    await rounds()
    with pytest.raises(ConnectionError, match="model_worker/1"):
        collector.check()
    await collector.close()


@pytest.mark.parametrize("wait", ["changed", "refresh"])
async def test_a_worker_that_is_gone_fails_whoever_waits(wait: str) -> None:
    workers = Workers(2)
    workers.failure = ConnectionError("model_worker/1 is gone")
    collector, _ = collector_of(workers, SampleBuffer(4, 0, "drop"))
    collector.start()
    await rounds()
    workers.wake[1].set()
    with pytest.raises(ConnectionError, match="model_worker/1"):
        await (collector.changed(1) if wait == "changed" else collector.refresh())
    await collector.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_worker_that_is_silent_for_a_while_is_asked_again() -> None:
    workers, buffer = Workers(1), SampleBuffer(1, 0, "drop")
    workers.received[0].append(record(0))
    collector, _ = collector_of([Silent(workers, 0)], buffer)
    collector.start()
    try:
        waiting = asyncio.create_task(collector.refresh())
        await rounds(3)
        assert collector.silent == [0]
        async with asyncio.timeout(300):
            await waiting
        assert len(buffer) == 1
        assert collector.silent == []
        collector.check()
    finally:
        await collector.close()
