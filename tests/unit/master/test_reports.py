"""The MasterWorker's reports to the GserverManager, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from asyncrl.comm.ended_rollouts.ledger_lines import PromptGoes
from asyncrl.comm.http.calls import HttpRefused
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.manager import messages as m
from asyncrl.manager.client import GateStatus, ManagerClient
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books.reports import Reports, ReportState, given_up
from asyncrl.master.books.run_files import BooksError
from asyncrl.master.data.collector import received
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.metrics import filtered as filtered_module
from asyncrl.master.metrics.filtered import FilteredOut, watch_filters
from asyncrl.master.settings import OnStale
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from asyncrl.trainer.messages import RolloutRecord
from tests.unit.master.test_recorded import admitted, dropped, fold, trained

NONE = cast(Any, None)


class EveryStepIsWhole:
    def may_report(self, version: int) -> bool:
        return True


class NothingAtTheRanks:
    def __init__(self) -> None:
        self.told, self.discarded = list[str](), list[str]()

    async def refresh(self) -> None:
        self.told.append("refresh")

    async def confirm(self) -> None:
        self.told.append("confirm")

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
    """Is not rebuilt for `shut_s` seconds."""

    def __init__(self, shut_s: float = 0.0) -> None:
        self.shut_s = shut_s
        self.told = list[str]()
        self.reports = list[m.ConsumedReport]()
        self.replies = list[m.ConsumedReply]()

    async def report_run(self, report: m.RunReport) -> int:
        self.told.append("run")
        return 7

    async def report_consumed(self, *report: Any) -> m.ConsumedReply:
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


def reports_to(manager: Manager, limit_s: float = 60.0) -> Reports:
    ranks = cast(Any, NothingAtTheRanks())
    return Reports(cast(Any, manager), ranks, state(), asyncio.Event(), limit_s=limit_s)


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


def test_a_step_is_reported_once_and_until_then_to_a_new_manager_too() -> None:
    one = state()
    one.trained(TrainBatch(0, 0, (record("r0", 0), record("r1", 1))))
    cast(Any, one)._ledger.recorded = fold(admitted(0))
    assert one.due
    assert one.reported_books is None, "the books do not have it yet"
    assert one.next_report(1) == m.ConsumedReport(1, ["r0", "r1"], [], events_after=1)
    run = one.run_report(1)
    assert (run.version, run.trained_version) == (0, 1), "the ledger does not have the step yet"
    assert run.trained == [received(record("r0", 0)), received(record("r1", 1))]
    assert run.open == [admitted(0)]
    books = m.Books(2, 2, {}, 0, version=1, trained_version=1)
    one.take(m.ConsumedReply(books, [admitted(5)], 1, [("e0-0", 0.5)], 9, 2.0, [4]))
    assert cast(Any, one)._ledger.lines == [admitted(5)]
    assert not one.due
    assert one.run_report(1).trained == []
    assert one.reported_books == books
    assert one.last_reply.status == GateStatus(2.0, frozenset({4}), {})
    assert one.next_report(1) == m.ConsumedReport(1, [], [], events_after=1, measured_after=9)
    assert one.curriculum.state() != Curriculum(0.0, 1.0, 1).state(), "it has the measured success"


def test_a_master_that_takes_over_reports_the_last_step_again_and_trains_none_of_its_rollouts_again() -> None:
    successor = state()
    successor.take_up([received(record("r0", 0))])
    assert successor.next_report(1) == m.ConsumedReport(1, ["r0"], [])
    assert successor.run_report(1).trained == [received(record("r0", 0))]
    assert cast(Any, successor)._buffer.add([record("r0", 0)]), "a copy"


async def test_what_the_buffer_drops_is_reported_once_and_freed_at_the_ranks() -> None:
    manager = Manager()
    reports = reports_to(manager)
    ranks, buffer = cast(Any, reports)._collector, cast(Any, reports.state)._buffer
    buffer.add([record("r0", 0, oldest=2), record("r1", 1)])
    buffer.expire(2)
    await reports.report(0)
    assert manager.reports[0].dropped == [m.DroppedRollout("r1", "stale")]
    assert ranks.discarded == ["r1"]
    await reports.report(0)
    assert manager.told == ["run", "consumed"], "nothing is due"
    buffer.add([record("r2", 2)])
    run = reports.state.run_report(0)
    assert [each.rollout_id for each in run.received] == ["r0", "r2"], "a new manager must know it before it is dropped"
    buffer.add([record("r3", 3)])
    await reports.last(0)
    assert [drop.rollout_id for drop in manager.reports[1].dropped] == ["r2", "r3"]


def test_a_prompt_that_the_manager_drops_for_good_is_used_and_no_other() -> None:
    """Its admission is in the ledger, or comes with the same reply."""
    one = state()
    recorded = cast(Any, one)._ledger.recorded = fold(admitted(0), admitted(1), admitted(4))
    lines = [
        dropped(0, "failed", PromptGoes.given_up),
        dropped(1, "worker_died", PromptGoes.returned),
        admitted(2),
        admitted(3),
        dropped(2, "failed", PromptGoes.given_up),
        dropped(4, "lost_with_manager", PromptGoes.used),
    ]
    assert list(given_up(recorded, lines)) == ["e0-0", "e0-2"]
    one.take(m.ConsumedReply(m.Books(5, 0, {}, 0, version=0, trained_version=0), lines, 6))
    assert set(cast(Any, one)._buffer.used) == {"e0-0", "e0-2"}


async def test_nothing_is_reported_of_a_step_whose_state_is_not_complete() -> None:
    manager = Manager()
    reports = reports_to(manager)
    whole = cast(Any, reports.state.memory_checkpointer)
    whole.may_report = lambda version: False
    reports.state.trained(TrainBatch(0, 0, (record("r0", 0),)))
    await reports.report(1)
    await reports.last(1)
    assert manager.told == []
    whole.may_report = lambda version: True
    await reports.report(1)
    assert manager.told == ["run", "consumed"]
    assert cast(Any, reports.state)._ledger.managers == [7]
    assert cast(Any, reports)._collector.told == ["refresh", "confirm"]


async def test_the_manager_hears_of_the_run_once_before_any_report() -> None:
    manager = Manager()
    reports = reports_to(manager)
    await reports.last(0)
    await reports.introduce(0)
    assert manager.told == ["run", "consumed"]


async def test_a_manager_hears_what_the_ranks_have_before_it_says_what_counts() -> None:
    manager = cast(Any, Manager())
    reports = reports_to(manager)
    cast(Any, reports)._collector.told = manager.told
    answer = manager.report_run

    async def refuse(report: m.RunReport) -> int:
        manager.told.append("refused")
        raise ConnectionError

    manager.report_run = refuse
    with pytest.raises(ConnectionError):
        await reports.introduce(0)
    assert manager.told == ["refresh", "refused"]
    manager.report_run = answer
    await reports.introduce(0)
    assert manager.told[2:] == ["refresh", "run", "confirm"]


async def test_the_books_are_closed_in_order_also_where_the_beginning_did_not_come_that_far() -> None:
    manager = Manager()
    await reports_to(manager).close_books(0, complete=True)
    assert manager.told == ["run", "close", "abandon", "consumed"]


@pytest.mark.parametrize(("complete", "limit_s"), [(False, 5), (True, 31)])
async def test_a_complete_run_waits_as_long_for_its_last_books_as_for_any_sign_of_life(
    complete: bool, limit_s: int
) -> None:
    manager = cast(Any, Manager())

    async def silent() -> None:
        raise TimeoutError

    manager.close_gate = silent
    with pytest.raises(BooksError, match=f"within {limit_s} s"):
        await reports_to(manager, limit_s=31.0).close_books(0, complete=complete)


async def test_a_status_is_asked_for_without_a_report() -> None:
    manager = Manager()
    reports = reports_to(manager)
    await reports.look()
    assert reports.state.last_reply.status.idle_s == 3.0
    assert manager.told == []


async def test_the_last_report_waits_for_a_manager_that_waits_for_a_silent_worker() -> None:
    """The brain and a worker died as the run ended: the next manager's gate is shut for the worker's lease."""
    with pytest.raises(BooksError, match=r"within 0\.05 s"):
        await reports_to(Manager(shut_s=0.2), limit_s=0.05).close_books(0, complete=True)
    await reports_to(Manager(shut_s=0.2)).close_books(0, complete=True)


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
