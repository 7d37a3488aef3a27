"""The MasterWorker's reports to the GserverManager, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from asyncrl.comm.ended_rollouts.ledger_lines import PromptGoes
from asyncrl.comm.http.calls import HttpRefused
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.manager import messages as m
from asyncrl.manager.client import GateStatus, ManagerClient, NotIntroduced
from asyncrl.manager.messages import GateBooks
from asyncrl.master.books import reports as reports_module
from asyncrl.master.books.reports import Reports, ReportState
from asyncrl.master.books.run_files import BooksError
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.metrics import filtered as filtered_module
from asyncrl.master.metrics.filtered import FilteredOut, watch_filters
from asyncrl.master.peers import connections
from asyncrl.master.peers.connections import introduce_each
from asyncrl.master.settings import OnStale
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from tests.unit.master.test_recorded import admitted, dropped, fold, trained

NONE = cast(Any, None)


class EveryStepIsWhole:
    def may_report(self, version: int) -> bool:
        return True

    def kept_of(self, measured_seq: int) -> int:
        return measured_seq


class NothingAtTheRanks:
    async def refresh(self) -> None:
        pass


class LedgerInMemory:
    def __init__(self) -> None:
        self.recorded = fold()
        self.managers: list[int] = []

    def begin_manager(self, number: int) -> None:
        self.managers.append(number)

    def take(self, lines: list[Any]) -> None:
        assert not lines


class Manager:
    """Refuses the first `refused` reports as one that must first be told; is not rebuilt for `shut_s` seconds."""

    def __init__(self, refused: float = 0, shut_s: float = 0.0) -> None:
        self.refused, self.shut_s = refused, shut_s
        self.calls = 0

    async def report_run(self, report: m.RunReport) -> int:
        return 7

    async def report_consumed(self, *report: object) -> m.ConsumedReply:
        self.calls += 1
        if self.calls <= self.refused:
            raise NotIntroduced("another manager is there")
        return m.ConsumedReply(GateBooks(0, 0, {}, 0), [], 0, [], 0, 0.0, [])

    async def close_gate(self) -> None:
        await asyncio.sleep(self.shut_s)

    async def abandon(self) -> None:
        pass


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
