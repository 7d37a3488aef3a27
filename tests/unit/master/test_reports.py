"""The MasterWorker's reports to the GserverManager, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import msgspec
import pytest

from asyncrl.comm.ended_rollouts.ledger_lines import Dropped, PromptGoes
from asyncrl.comm.http.calls import HttpRefused
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.manager import messages as m
from asyncrl.manager.client import GateStatus, ManagerClient, NotIntroduced
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books import reports as reports_module
from asyncrl.master.books.reports import Reports, ReportState, decide, received
from asyncrl.master.books.run_files import BooksError
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.metrics import filtered as filtered_module
from asyncrl.master.metrics.filtered import FilteredOut, watch_filters
from asyncrl.master.peers import connections
from asyncrl.master.peers.connections import introduce_each
from asyncrl.master.settings import OnStale
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from asyncrl.trainer.messages import RolloutRecord
from tests.unit.master.test_recorded import admitted, dropped, fold, trained

NONE = cast(Any, None)


class EveryStepIsWhole:
    def may_report(self, version: int) -> bool:
        return True

    def kept_of(self, measured_seq: int) -> int:
        return measured_seq


class NothingAtTheRanks:
    def __init__(self) -> None:
        self.refreshed, self.discarded = 0, list[str]()

    async def refresh(self) -> None:
        self.refreshed += 1

    async def discard(self, records: list[RolloutRecord], limit_s: float) -> None:
        self.discarded += [record.rollout_id for record in records]


class LedgerInMemory:
    def __init__(self) -> None:
        self.recorded = fold()
        self.managers: list[int] = []
        self.lines: list[Any] = []

    def begin_manager(self, number: int) -> None:
        self.managers.append(number)

    def take(self, lines: list[Any]) -> None:
        self.lines += lines


class Manager:
    """Refuses the first `refused` reports as one that must first be told; is not rebuilt for `shut_s` seconds."""

    def __init__(self, refused: float = 0, shut_s: float = 0.0) -> None:
        self.refused, self.shut_s = refused, shut_s
        self.calls = 0

        self.told = list[str]()
        self.reports = list[m.ConsumedReport]()
        self.replies = list[m.ConsumedReply]()

    async def report_run(self, report: m.RunReport) -> int:
        self.told.append("run")
        return 7

    async def report_consumed(self, *report: Any) -> m.ConsumedReply:
        self.calls += 1
        if self.calls <= self.refused:
            raise NotIntroduced("another manager is there")
        self.told.append("consumed")
        self.reports.append(m.ConsumedReport(*report))
        return self.replies.pop(0) if self.replies else m.ConsumedReply(GateBooks(0, 0, {}, 0), [], 0, [], 0, 0.0, [])

    async def close_gate(self) -> None:
        self.told.append("close")
        await asyncio.sleep(self.shut_s)

    async def abandon(self) -> None:
        self.told.append("abandon")

    async def status(self) -> GateStatus:
        return GateStatus(idle_s=3.0)


def state() -> ReportState:
    return ReportState(
        SampleBuffer(2, 1, OnStale.drop),
        cast(Any, LedgerInMemory()),
        Curriculum(0.0, 1.0, 1),
        cast(Any, EveryStepIsWhole()),
    )


def reports_to(manager: Manager, lease_s: float = 1.0) -> Reports:
    ranks = cast(Any, NothingAtTheRanks())
    return Reports(cast(Any, manager), ranks, state(), asyncio.Event(), limit_s=60.0, lease_s=lease_s)


def test_a_master_that_takes_over_has_the_books_that_the_ledgers_lines_add_up_to() -> None:
    """A checkpoint's `saved` line has them: those of the step that it continues from are older."""
    buffer = SampleBuffer(2, 1, OnStale.drop)
    state = ReportState(buffer, NONE, Curriculum(0.0, 1.0, 1), NONE)
    state.restore(2, {}, Curriculum(0.0, 1.0, 1))
    given_up = dropped(3, "failed", PromptGoes.given_up)
    recorded = fold(*map(admitted, range(4)), trained(0), trained(1), given_up)
    state.continue_after(recorded)
    assert state.reported_books == GateBooks(4, 2, {"failed": 1}, 0, 1, 0)
    assert set(buffer.used) == {"e0-0", "e0-1", "e0-3"}


def record(name: str, order: int, oldest: int = 0) -> RolloutRecord:
    return RolloutRecord(name, f"e0-{order}", order, 0, oldest, {}, (2, 3), (1, 1), (1.0, 0.0), (False, False), (0, 1))


def test_at_the_start_of_a_run_nothing_is_counted_or_due() -> None:
    begun = state()
    assert begun.reported_books == GateBooks(0, 0, {}, 0)
    assert not begun.due
    assert begun.next_report(0) == m.ConsumedReport(0, [], [])
    assert begun.run_report(0) == m.RunReport(
        used=SampleBuffer(2, 1, OnStale.drop).used.to_json(),
        consumed=m.ConsumedReport(0, [], []),
        curriculum=Curriculum(0.0, 1.0, 1).state(),
    )


def test_a_resumed_run_counts_what_was_trained_and_dropped_before() -> None:
    resumed = state()
    resumed.restore(4, {"stale": 2, "timeout": 1}, Curriculum(0.0, 1.0, 1))
    assert resumed.reported_books == GateBooks(7, 4, {"stale": 2, "timeout": 1}, 0)


def test_a_rollout_of_which_nothing_was_generated_counts_as_of_the_first_version() -> None:
    assert received(record("r", 3, oldest=2)) == m.ReceivedRollout("r", "e0-3", 3, 2, 5)
    assert received(record("r", 3, oldest=-1)).version == 0
    empty = msgspec.structs.replace(record("r", 3), lengths=(0, 0))
    assert received(empty).tokens == 1
    assert received(msgspec.structs.replace(empty, lengths=(1, 0))).tokens == 1


def test_a_step_is_reported_once_with_what_the_ledger_does_not_know_of_it() -> None:
    one = state()
    one.trained(TrainBatch(0, 0, (record("r0", 0), record("r1", 1))))
    cast(Any, one)._ledger.recorded = fold(admitted(0))
    assert one.due
    assert one.reported_books is None, "the books do not have it yet"
    report = one.next_report(1)
    assert (report.version, report.trained) == (1, ["r0", "r1"])
    assert [each.rollout_id for each in report.unknown] == ["r1"]
    books = m.Books(2, 2, {}, 0, version=1, trained_version=1)
    one.take(m.ConsumedReply(books, [admitted(5)], 1, [("e0-0", 0.5)], 9, 2.0, [4]))
    assert cast(Any, one)._ledger.lines == [admitted(5)]
    assert not one.due
    assert one.reported_books == books
    assert one.last_reply.status == GateStatus(2.0, frozenset({4}), {})
    assert one.next_report(1) == m.ConsumedReport(1, [], [], events_after=1, measured_after=9)
    assert one.curriculum.state() != Curriculum(0.0, 1.0, 1).state(), "it has the measured success"


def test_a_master_that_takes_over_reports_the_last_step_again_and_trains_none_of_its_rollouts_again() -> None:
    successor = state()
    successor.take_up([received(record("r0", 0))], 6)
    report = successor.next_report(1)
    assert (report.trained, report.measured_after) == (["r0"], 6)
    assert cast(Any, successor)._buffer.add([record("r0", 0)]), "a copy"


async def test_what_the_buffer_drops_is_reported_and_freed_at_the_ranks_until_nothing_more_is_dropped() -> None:
    manager = Manager()
    reports = reports_to(manager)
    ranks, buffer = cast(Any, reports)._collector, cast(Any, reports.state)._buffer
    buffer.add([record("r0", 0), record("r1", 0)])
    await reports.report(0)
    assert [(drop.rollout_id, drop.reason) for drop in manager.reports[0].dropped] == [("r1", "duplicate_prompt")]
    assert ranks.discarded == ["r1"]
    await reports.report(0)
    assert manager.told == ["consumed"], "nothing is due"
    buffer.add([record("r2", 0)])
    assert [drop.rollout_id for drop in reports.state.run_report(0).consumed.dropped] == ["r2"]
    buffer.add([record("r3", 0)])
    await reports.last(0)
    assert [drop.rollout_id for drop in manager.reports[1].dropped] == ["r2", "r3"]


def test_a_prompt_is_given_up_once_and_not_if_it_is_trained() -> None:
    buffer, recorded = SampleBuffer(2, 1, OnStale.drop), fold(admitted(0), admitted(1))
    buffer.used.add("e0-1")
    lines = [
        *(dropped(order, "failed", PromptGoes.given_up) for order in (0, 1)),
        admitted(2),
        dropped(2, "failed", PromptGoes.given_up),
        dropped(3, "stale", PromptGoes.returned),
    ]
    goes = [line.prompt for line in decide(buffer, recorded, lines) if isinstance(line, Dropped)]
    assert goes == [PromptGoes.given_up, PromptGoes.used, PromptGoes.given_up, PromptGoes.returned]
    assert decide(buffer, recorded, lines)[2] == admitted(2)
    assert set(buffer.used) == {"e0-0", "e0-1", "e0-2"}


async def test_nothing_is_reported_of_a_step_whose_state_is_not_complete() -> None:
    manager = Manager()
    reports = reports_to(manager)
    whole = cast(Any, reports.state.memory_checkpointer)
    whole.may_report = lambda version: False
    reports.state.trained(TrainBatch(0, 0, (record("r0", 0),)))
    await reports.report(1)
    await reports.last(1)
    assert await reports._introduce(1) is False
    assert manager.told == []
    whole.may_report = lambda version: True
    assert await reports._introduce(1) is True
    assert cast(Any, reports.state)._ledger.managers == [7]
    assert cast(Any, reports)._collector.refreshed == 2, "the ranks are asked first"


async def test_a_manager_that_is_new_is_told_of_the_run_before_the_report() -> None:
    manager = Manager(refused=1)
    await reports_to(manager).last(0)
    assert manager.told == ["run", "consumed"]


async def test_the_books_are_closed_in_order_and_a_later_manager_hears_that_they_are() -> None:
    manager = Manager()
    reports = reports_to(manager)
    assert not reports.state.run_report(0).closed
    await reports.close_gate()
    assert (reports.state.run_report(0).closed, reports.state.run_report(0).abandoned_all) == (True, False)
    await reports.close_books(0, complete=True)
    assert manager.told == ["close", "close", "abandon", "consumed"]
    assert reports.state.run_report(0).abandoned_all


@pytest.mark.parametrize(("complete", "limit_s"), [(False, 5), (True, 31)])
async def test_a_complete_run_waits_for_a_lease_longer_for_its_last_books(complete: bool, limit_s: int) -> None:
    manager = cast(Any, Manager())

    async def silent() -> None:
        raise TimeoutError

    manager.close_gate = silent
    with pytest.raises(BooksError, match=f"within {limit_s} s"):
        await reports_to(manager, lease_s=1.0).close_books(0, complete=complete)


async def test_a_status_is_asked_for_without_a_report() -> None:
    manager = Manager()
    reports = reports_to(manager)
    await reports.look()
    assert reports.state.last_reply.status.idle_s == 3.0
    assert manager.told == []


async def test_a_refusal_that_ends_the_following_of_managers_ends_the_next_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MANAGER_LOOK_S", 0.0)
    manager = cast(Any, Manager())

    async def refuse(report: m.RunReport) -> int:
        raise HttpRefused("http://manager/report_run", 413, b"more than 256 MB")

    manager.report_run = refuse
    reports = reports_to(manager)
    reports.check()
    reports.follow(lambda: "0/17", lambda: 0)
    reports.check()
    async with asyncio.timeout(300):
        with pytest.raises(HttpRefused):
            await cast(Any, reports)._following
    with pytest.raises(HttpRefused):
        await reports.report(0)
    await reports.close()


async def test_who_closes_follows_no_manager_any_more() -> None:
    reports = reports_to(Manager())
    await reports.close()
    reports.follow(lambda: None, lambda: 0)
    await reports.close()
    assert cast(Any, reports)._following.cancelled()


async def test_a_manager_that_is_another_each_time_is_not_called_without_pause() -> None:
    manager = Manager(refused=float("inf"))
    reports = reports_to(manager)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5 * connections.MANAGER_LOOK_S):
            await reports.close_books(0, complete=True)
    assert 1 < manager.calls <= 4


async def test_the_last_report_waits_for_a_manager_that_waits_for_a_silent_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A manager and a worker died as the run ended: the next manager's gate is shut for the worker's lease."""
    monkeypatch.setattr(reports_module, "LAST_BOOKS_LIMIT_S", 0.05)
    with pytest.raises(BooksError, match=r"within 0\.05 s"):
        await reports_to(Manager(shut_s=0.2), lease_s=0.0).close_books(0, complete=True)
    await reports_to(Manager(shut_s=0.2), lease_s=60.0).close_books(0, complete=True)


async def test_a_manager_that_refuses_to_be_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have its port for a moment."""
    monkeypatch.setattr(connections, "MANAGER_LOOK_S", 0.0)
    tries, told = count(1), asyncio.Event()

    async def introduce() -> bool:
        if next(tries) == 1:
            raise HttpRefused("http://manager/report_run", 404, b"")
        told.set()
        return True

    following = asyncio.create_task(introduce_each(lambda: "0/17", introduce))
    async with asyncio.timeout(300):
        await told.wait()
    following.cancel()


async def test_a_manager_that_always_refuses_to_be_told_ends_the_run_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MANAGER_LOOK_S", 0.0)

    async def introduce() -> bool:
        raise HttpRefused("http://manager/report_run", 413, b"more than 256 MB")

    async with asyncio.timeout(300):
        with pytest.raises(HttpRefused, match="413: more than 256 MB"):
            await introduce_each(lambda: "0/17", introduce)


async def test_a_manager_that_waits_for_workers_is_called_for_longer_than_one_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`manager.rollout_lease_s` may be longer than the time for which calls to a silent manager are repeated."""
    monkeypatch.setattr("asyncrl.manager.worker_session._BACKOFF", Backoff(0.05, 0.05))
    client = ManagerClient("http://manager", "master_worker/0", None, retry_s=0.2)
    statuses = [503] * 8

    async def call(method: str, url: str, request: object, **options: object) -> m.Session:
        if statuses:
            raise HttpRefused(url, statuses.pop(), b"")
        return m.Session(7)

    cast(Any, client)._connection.http.call = call
    assert await client.report_run(state().run_report(0)) == 7


async def test_a_status_without_counters_is_not_compared_with_one_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manager was replaced: until it is rebuilt its counters are zeros, and then those of the whole run."""
    monkeypatch.setattr(filtered_module, "LOOK_S", 0.0)
    filtered = {"zero_variance": 900}
    statuses = [GateStatus(dropped=filtered), GateStatus(rebuilt=False), GateStatus(dropped=filtered)]
    all_seen, warnings = asyncio.Event(), list[str]()

    class Statuses:
        async def status(self) -> GateStatus:
            if len(statuses) == 1:
                all_seen.set()
            return statuses.pop(0) if len(statuses) > 1 else statuses[0]

    versions: Callable[[], int] = iter([1, 2, 2, *[2] * 1000]).__next__
    watching = asyncio.create_task(
        watch_filters(FilteredOut(2), cast(Any, Statuses()), versions, lambda: 0, warnings.append)
    )
    async with asyncio.timeout(300):
        await all_seen.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    watching.cancel()
    assert not warnings
