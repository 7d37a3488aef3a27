"""The manager's methods through HTTP, with the client that workers and the master use."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.comm.ended_rollouts import Dropped, Line, PromptFate, RolloutCounts, RunSettings
from asyncrl.comm.http_client import HttpRefused
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.waits import RunningClock
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompt_queue import DataOrder, PromptQueue
from asyncrl.manager.client import ManagerClient, ManagerGone
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.messages import (
    AllocateRequest,
    CloseGate,
    ConsumedReport,
    DroppedRollout,
    EndReport,
    FinishedRollout,
    ReceivedReport,
    ReceivedRollout,
    RequestSize,
    RouteRequest,
    RunBegin,
    StatusReply,
    StatusRequest,
    TrainedRollout,
    WaitExpiringRequest,
)
from asyncrl.manager.process import manager_registry
from asyncrl.manager.rollouts.ledger_files import lines_in
from asyncrl.manager.rollouts.rollout_state import Ledger
from asyncrl.manager.service import MAX_BODY_BYTES, ManagerHttp, ManagerService
from asyncrl.manager.settings import UpdateMode


class Clock:
    """Time that stands still unless it is told to pass; deadlines of held calls are then over."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


ORDER = DataOrder(1000, 0)


class Manager:
    """A manager in this loop: B = 2, η = 1, one server at version 0 unless the test changes it."""

    def __init__(self, security: HttpSecurity, ledger: Path, number: int = 0) -> None:
        self.security, self.folder = security, ledger
        self.ledger = Ledger(ledger, RunSettings(2, 1, "drop", 1, 0))
        self.clock = Clock()
        self.service = ManagerService(
            batch_size=2,
            max_staleness=1,
            routing="least_requests",
            lease_s=30.0,
            order=ORDER,
            clock=self.clock,
            versions_in_use=lambda: {4, 3},
            ledger=self.ledger,
            number=number,
        )
        registry = manager_registry(self.service, FleetDecisions(UpdateMode.interrupt, 1.0))
        self.http = ManagerHttp(
            self.service.methods() | {"/status": (StatusRequest, self.status)}, security=security, registry=registry
        )
        self.url = ""
        self.clients: list[ManagerClient] = []

    def client(self, worker: str = "rollout_worker/0", token: str = "", retry_s: float = 60.0) -> ManagerClient:
        security = dataclasses.replace(self.security, token=token or self.security.token)
        self.clients.append(ManagerClient(self.url, worker, security, retry_s=retry_s))
        return self.clients[-1]

    async def status(self, request: StatusRequest) -> StatusReply:
        return StatusReply(self.service.gate_state(), [], None, [])

    def counts(self) -> RolloutCounts:
        return self.service.gate.counts()

    def given_up(self) -> list[str]:
        """The rollouts with which a prompt was dropped for good, by the lines in the ledger's files."""
        lines = [msgspec.json.decode(line, type=Line) for line in lines_in(self.folder)]
        drops = [line for line in lines if isinstance(line, Dropped)]
        return [line.rollout for line in drops if line.prompt is PromptFate.given_up]

    async def begin(self, run: RunBegin) -> None:
        """Begin the run, as the master does, without workers that hold anything."""
        self.service.await_workers({})
        await self.client("master_worker/0").call(run)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.http.close()
        self.ledger.close()

    def serve(self, version: int, index: int = 0) -> None:
        self.service.router.update(index, f"http://server{index}", version, True)
        self.service.routes_changed(version)


@pytest.fixture
async def manager(
    http_security: HttpSecurity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Manager]:
    monkeypatch.setattr("asyncrl.manager.client.CLOSE_S", 60.0)
    manager = Manager(http_security, tmp_path / "ledger")
    manager.url = await manager.http.start("127.0.0.1")
    manager.serve(0)
    await manager.begin(RunBegin())
    yield manager
    await manager.close()


def trusting(manager: Manager) -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(ssl=manager.security.client_context())


def request_of(name: str, rollout: str | None = None, min_version: int | None = None) -> RouteRequest:
    return RouteRequest(10, 20, 4, request_id=name, rollout_id=rollout, min_version=min_version)


async def accept(client: ManagerClient, *names: str) -> None:
    """A worker reports that it delivered these rollouts, and the master that they arrived."""
    client.finish([FinishedRollout(name, True) for name in names])
    await client.flush()
    assert (await client.call(ReceivedReport([arrived(name) for name in names]))).refused == []


def trained(name: str) -> TrainedRollout:
    return TrainedRollout(name, "a prompt", 0, {0: 4}, 1, 1, 1.0)


def arrived(name: str) -> ReceivedRollout:
    return ReceivedRollout(name, "a prompt", 0, 0, 7)


async def held(manager: Manager, waiting: Callable[[], int], count: int = 1) -> None:
    """Let the loop turn until `count` calls are held by the manager."""
    async with asyncio.timeout(300):
        while waiting() < count:  # noqa: ASYNC110  (there is no event for "a call is being held")
            await asyncio.sleep(0)


async def test_a_prefix_is_granted_and_the_rest_waits_for_room(manager: Manager) -> None:
    client = manager.client()
    first = await client.allocate([*"abcde"], timeout_s=30)
    assert [(grant.rollout_id, grant.version) for grant in first.granted] == [(name, 0) for name in "abcd"]
    assert (first.version, first.closed) == (0, False)
    second = asyncio.create_task(client.allocate(["e"], timeout_s=30))
    await held(manager, lambda: len(manager.service.admission.calls))
    await accept(client, "a", "b")
    await client.call(ConsumedReport(1, [trained("a"), trained("b")]))
    assert not second.done()
    manager.serve(1)
    assert [grant.version for grant in (await second).granted] == [1]


async def test_a_repeated_allocation_is_answered_as_before_even_without_room(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"abcd"], timeout_s=30)
    again = await client.allocate([*"abcde"], timeout_s=30)
    assert [grant.rollout_id for grant in again.granted] == list("abcd")
    assert manager.counts().submitted == 4


async def test_workers_that_wait_get_a_rollout_each_in_turn(manager: Manager) -> None:
    clients = [manager.client(f"rollout_worker/{index}") for index in range(2)]
    await clients[0].allocate([*"abcd"], timeout_s=30)
    waiting = [
        asyncio.create_task(client.allocate(names, timeout_s=30))
        for client, names in zip(clients, (["x", "y"], ["u", "v"]), strict=True)
    ]
    await held(manager, lambda: len(manager.service.admission.calls), 2)
    manager.serve(1)
    granted = [(await each).granted for each in waiting]
    assert sorted([grant.order for grant in each] for each in granted) == [[4], [5]]


async def test_a_prompt_that_the_trainer_dropped_is_the_next_for_any_worker(manager: Manager) -> None:
    client, other = manager.client(), manager.client("rollout_worker/1")
    (first, _) = (await client.allocate(["a", "b"], timeout_s=30)).granted
    await other.call(ConsumedReport(0, [], [DroppedRollout("a", "stale")]))
    (again, later) = (await other.allocate(["c", "d"], timeout_s=30)).granted
    assert (again.prompt_id, again.order, again.row, again.attempt) == (first.prompt_id, 0, first.row, 0)
    assert later.order == 2
    assert manager.counts().dropped == {"stale": 1}


async def test_a_prompt_that_failed_comes_at_once_and_one_that_was_filtered_after_its_epoch(manager: Manager) -> None:
    client = manager.client()
    await client.allocate(["a", "b"], timeout_s=30)
    client.finish([FinishedRollout("a", False, "failed", return_prompt=True)])
    client.finish([FinishedRollout("b", False, "dull", return_prompt=True, as_next_attempt=True)])
    granted = (await client.allocate(["c", "d"], timeout_s=30)).granted
    assert [(grant.order, grant.attempt, grant.failures) for grant in granted] == [(0, 0, 1), (2, 0, 0)]


async def test_a_prompt_that_a_worker_drops_for_good_is_used_and_in_the_ledger_before_the_master_hears_of_it(
    manager: Manager,
) -> None:
    worker, master = manager.client(), manager.client("master_worker/0")
    await worker.allocate(["a", "b", "c", "d"], timeout_s=30)
    ends = [("a", "failed", False), ("b", "failed", True), ("c", "zero_variance", False)]
    worker.finish([FinishedRollout(name, False, reason, return_prompt=back) for name, reason, back in ends])
    worker.finish([FinishedRollout("d", True)])
    await worker.flush()
    assert manager.given_up() == []
    dropped_by_trainer = [DroppedRollout("d", "stale")]
    first = await master.call(ConsumedReport(0, [], dropped_by_trainer))
    assert manager.given_up() == ["a", "c"]
    assert first.checkpoint is None
    assert (first.counts.submitted, first.counts.dropped) == (4, {"failed": 2, "zero_variance": 1, "stale": 1})
    lines = manager.ledger.lines
    again = await master.call(ConsumedReport(0, [], dropped_by_trainer))
    assert (again, manager.ledger.lines) == (first, lines), "the first reply may have been lost"


async def test_a_step_is_in_the_ledger_before_the_master_hears_of_it_and_counts_once(manager: Manager) -> None:
    worker, master = manager.client(), manager.client("master_worker/0")
    await worker.allocate([*"abcd"], timeout_s=30)
    await accept(worker, *"abc")
    first = await master.call(ConsumedReport(1, [trained("a"), trained("b")]))
    lines = list(lines_in(manager.folder))
    assert (len(lines), b'"kind":"step"' in lines[-1]) == (manager.ledger.lines, True)
    assert first.checkpoint is not None
    assert (first.checkpoint.line, first.checkpoint.prompts_used, first.counts.trained) == (len(lines), 2, 2)
    worker.finish([FinishedRollout("d", False, "failed")])
    await worker.flush()
    again = await master.call(ConsumedReport(1, [trained("a"), trained("b")]))
    later = list(lines_in(manager.folder))[len(lines) :]
    assert again == first, "the first reply may have been lost; the drop is not in the step's state"
    assert [b'"kind":"dropped"' in line for line in later] == [True]


async def test_the_end_of_the_run_is_the_ledgers_last_line_however_often_it_is_reported(manager: Manager) -> None:
    worker, master = manager.client(), manager.client("master_worker/0")
    await worker.allocate(["a", "b"], timeout_s=30)
    counts = await master.call(EndReport(0))
    lines = list(lines_in(manager.folder))
    assert (counts.abandoned, b'"kind":"end"' in lines[-1]) == (2, True)
    assert (await master.call(EndReport(0)), list(lines_in(manager.folder))) == (counts, lines)


async def test_calls_of_the_trainer_that_are_meant_for_another_manager_are_refused(
    http_security: HttpSecurity, tmp_path: Path
) -> None:
    """That of a master whose manager died before it; both are about to end."""
    manager = Manager(http_security, tmp_path / "ledger", number=3)
    manager.url = await manager.http.start("127.0.0.1")
    manager.serve(0)
    await manager.begin(RunBegin())
    master = manager.client("master_worker/0")
    before = manager.ledger.lines
    for call in (
        master.call(ReceivedReport([arrived("a")])),
        master.call(ConsumedReport(1, [trained("a")])),
        master.call(CloseGate()),
        master.call(EndReport(1)),
    ):
        with pytest.raises(HttpRefused, match=r"409.*\$.manager: 0 was the manager before, 3 is there"):
            await call
    assert (manager.ledger.lines, manager.service.gate.closed) == (before, False)
    await manager.close()


async def test_the_trainer_waits_until_the_gate_is_open(http_security: HttpSecurity, tmp_path: Path) -> None:
    """A worker that has yet to report may hold rollouts; the call is repeated."""
    manager = Manager(http_security, tmp_path / "ledger")
    manager.url = await manager.http.start("127.0.0.1")
    manager.service.await_workers({"rollout_worker/0": 0})
    master = manager.client("master_worker/0")
    await master.call(RunBegin(received=[arrived("a")]))
    reporting = asyncio.create_task(master.call(ReceivedReport([arrived("a")])))
    await held(manager, lambda: len(manager.service.progress._waiters))
    assert not reporting.done()
    manager.service.await_workers({})
    assert (await reporting).refused == [], "it counts since the master brought it"
    assert manager.counts().finished_untrained == 1
    await manager.close()


async def test_a_pause_of_the_manager_is_not_its_workers_silence(manager: Manager) -> None:
    clock = RunningClock(manager.clock)
    service = ManagerService(
        batch_size=2, max_staleness=1, routing="least_requests", lease_s=30.0, order=ORDER, clock=clock
    )
    service.begin(RunBegin())
    await service.allocate_rollout(AllocateRequest(worker="rollout_worker/0", rollouts=["a"]))
    manager.clock.now += 60.0  # the process is stopped
    assert service.expire_workers() == []
    for _ in range(31):
        manager.clock.now += 1.0
        clock()
    assert service.expire_workers() == ["rollout_worker/0"], "a silence that it was there for counts"


async def test_a_late_drop_of_a_rollout_that_was_given_up_as_lost_leaves_its_prompt_to_the_successor(
    manager: Manager,
) -> None:
    worker, master = manager.client(), manager.client("master_worker/0")
    await worker.allocate(["a"], timeout_s=30)
    manager.clock.now = 31.0
    assert manager.service.expire_workers() == ["rollout_worker/0"]
    worker.finish([FinishedRollout("a", False, "failed")])
    await worker.flush()
    await master.call(ConsumedReport(0))
    assert manager.given_up() == []


async def test_an_id_of_a_former_attempt_is_refused(manager: Manager) -> None:
    client = manager.client()
    await client.allocate(["a"], timeout_s=30)
    client.finish([FinishedRollout("a", False, "rejected", return_prompt=True)])
    with pytest.raises(HttpRefused, match="'a' was used before"):
        await client.allocate(["a"], timeout_s=30)


async def test_requests_of_one_turn_travel_in_one_call_and_are_released(manager: Manager) -> None:
    client = manager.client()
    manager.serve(0, index=1)
    routes = await asyncio.gather(*(client.schedule(request_of(str(i)), 5) for i in range(4)))
    assert sorted(route.url for route in routes if route) == ["http://server0"] * 2 + ["http://server1"] * 2
    for i in range(4):
        client.release(str(i))
    await client.close()
    assert manager.service.router.placed == 0


async def test_what_ended_travels_with_the_next_call(manager: Manager) -> None:
    client = manager.client()
    await client.allocate(["b"], timeout_s=30)
    client.finish([FinishedRollout("b", False, "rejected")])
    await client.allocate(["a"], timeout_s=30)
    await client.schedule(request_of("q", "a"), 5)
    client.release("q")
    await client.allocate([], timeout_s=0)
    assert manager.service.router.placed == 0
    assert manager.counts().dropped == {"rejected": 1}


async def test_a_release_that_no_call_follows_is_told_all_the_same(manager: Manager) -> None:
    client = manager.client()
    await client.schedule(request_of("q"), 5)
    client.release("q")
    assert manager.service.router.placed == 1
    await held(manager, lambda: manager.service.router.placed == 0)


@pytest.mark.parametrize("urgent", [FinishedRollout("b", False, "rejected"), FinishedRollout("b", True, success=1.0)])
async def test_what_makes_room_or_is_measured_does_not_wait_as_long_for_a_call_to_travel_with(
    manager: Manager, urgent: FinishedRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.manager.client.GATHER_S", 3600.0)
    client = manager.client()
    await client.allocate(["a", "b"], timeout_s=5)
    client.finish([FinishedRollout("a", True)])
    assert client._finished or client._released
    client.finish([urgent])
    await held(manager, lambda: not (client._finished or client._released))


async def test_a_release_is_told_again_after_a_call_that_was_refused(manager: Manager) -> None:
    client = manager.client()
    await client.schedule(request_of("q"), 5)
    client.release("q")
    rightful, client._worker = client._worker, 7  # type: ignore[assignment]
    with pytest.raises(HttpRefused, match=r"\$\.worker: expected str, got int"):
        await client.flush()
    client._worker = rightful
    assert manager.service.router.placed == 1
    await client.close()
    assert manager.service.router.placed == 0


async def test_an_admission_brings_a_server_for_the_first_request(manager: Manager) -> None:
    manager.service.admission._first = RequestSize(prompt_tokens=10, max_new_tokens=20, n=4)
    client = manager.client()
    manager.serve(0, index=1)
    asked = ["a", "b"]
    granted = (await client.allocate(asked, timeout_s=30)).granted
    urls = [grant.route and grant.route.url for grant in granted]
    assert urls == ["http://server0", "http://server1"]
    views = manager.service.router.servers
    assert [(view.sequences, view.tokens) for view in views] == [(4, 90), (4, 90)]
    again = (await client.allocate(asked, timeout_s=30)).granted  # as if the reply had been lost
    assert [view.sequences for view in views] == [4, 4]
    assert all(grant.route is not None for grant in again)
    client.release("a")  # the request is over
    await client.flush()
    assert [view.sequences for view in views] == [0, 4]
    await accept(client, "b")  # its rollout is, and it never asked
    assert manager.service.router.placed == 0


async def test_an_admission_without_a_server_to_be_had_leaves_its_request_to_be_scheduled(manager: Manager) -> None:
    manager.service.admission._first = RequestSize(prompt_tokens=10, max_new_tokens=20, n=4)
    manager.service.router.update(0, "http://server0", 0, False)
    (grant,) = (await manager.client().allocate(["a"], timeout_s=30)).granted
    assert grant.route is None


async def test_no_server_comes_with_an_admission_where_servers_are_drained(manager: Manager) -> None:
    (grant,) = (await manager.client().allocate(["a"], timeout_s=30)).granted
    assert grant.route is None
    assert manager.service.router.placed == 0


async def test_a_request_never_goes_below_its_rollouts_admission_version(manager: Manager) -> None:
    client = manager.client()
    manager.serve(3)
    await client.allocate(["a"], timeout_s=30)
    manager.service.router.update(0, "http://server0", 2, True)
    waiting = asyncio.create_task(client.schedule(request_of("q", "a"), 30))
    await held(manager, lambda: len(manager.service.routes.changed._waiters))
    manager.serve(4)
    route = await waiting
    assert route is not None
    assert route.version == 4


async def test_an_evaluation_waits_for_its_version(manager: Manager) -> None:
    client = manager.client()
    waiting = asyncio.create_task(client.schedule(request_of("q", None, 2), 30))
    await held(manager, lambda: len(manager.service.routes.changed._waiters))
    manager.serve(1)
    await held(manager, lambda: len(manager.service.routes.changed._waiters))
    assert not waiting.done()
    manager.serve(2)
    assert (await waiting) is not None


async def test_no_server_in_time_is_told_as_such(manager: Manager) -> None:
    manager.service.router.update(0, "http://server0", 0, False)
    assert await manager.client().schedule(request_of("q"), 0.01) is None


async def test_the_end_of_a_rollout_releases_its_requests(manager: Manager) -> None:
    client = manager.client()
    await client.allocate(["a"], timeout_s=30)
    await client.schedule(request_of("q", "a"), 5)
    await accept(client, "a")
    assert manager.service.router.placed == 0
    assert manager.service.rollouts.tokens_finished == 7


async def test_a_step_is_held_until_nothing_would_expire(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"abcd"], timeout_s=30)
    await accept(client, "a", "b")
    assert (await client.call(WaitExpiringRequest(0, 0.01))).running == []
    await client.call(ConsumedReport(1, [trained("a"), trained("b")]))
    assert sorted((await client.call(WaitExpiringRequest(1, 0.01))).running) == ["c", "d"]
    waiting = asyncio.create_task(client.call(WaitExpiringRequest(1, 30)))
    await held(manager, lambda: len(manager.service.progress._waiters))
    await accept(client, "c", "d")
    assert (await waiting).running == []


async def test_a_silent_workers_rollouts_are_dropped_and_go_to_its_successor(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"ab"], timeout_s=30)
    await accept(client, "b")
    await client.schedule(request_of("q", "a"), 5)
    manager.clock.now = 31.0
    assert manager.service.expire_workers() == ["rollout_worker/0"]
    assert manager.service.router.placed == 0
    counts = manager.counts()
    assert (counts.dropped, counts.running, counts.finished_untrained) == ({"worker_died": 1}, 0, 1)
    (again,) = (await manager.client("rollout_worker/1").allocate(["c"], timeout_s=0)).granted
    assert again.order == 0


async def test_what_a_worker_that_was_given_up_delivers_does_not_count_and_its_prompt_is_played_again(
    manager: Manager,
) -> None:
    """It was silent for longer than its lease, and lives."""
    client, master = manager.client(), manager.client("master_worker/0")
    await client.allocate(["a"], timeout_s=30)
    manager.clock.now = 31.0
    manager.service.expire_workers()
    client.finish([FinishedRollout("a", True)])
    await client.flush()
    assert (await master.call(ReceivedReport([arrived("a")]))).refused == ["a"]
    (again,) = (await client.allocate(["b"], timeout_s=30)).granted
    assert again.order == 0
    await accept(client, "b")
    await master.call(ConsumedReport(1, [trained("b")]))
    counts = manager.counts()
    assert (counts.trained, counts.running, counts.dropped) == (1, 0, {"worker_died": 1})
    assert (await master.call(ReceivedReport([arrived("b")]))).refused == ["b"], "it is trained"


async def test_a_request_of_a_rollout_that_ended_while_it_waited_is_not_placed(manager: Manager) -> None:
    client = manager.client()
    await client.allocate(["a"], timeout_s=30)
    manager.service.router.update(0, "http://server0", 0, False)
    waiting = asyncio.create_task(client.schedule(request_of("q", "a"), 30))
    await held(manager, lambda: len(manager.service.routes.changed._waiters))
    other = manager.client("rollout_worker/1")
    await accept(other, "a")
    manager.serve(0)
    assert await other.schedule(request_of("later"), 5) is not None
    assert not waiting.done()
    assert manager.service.router.placed == 1


async def test_what_is_placed_for_a_request_that_nobody_waits_for_any_more_is_released(manager: Manager) -> None:
    """An evaluation belongs to no rollout whose end would release it."""
    client = manager.client()
    manager.service.router.update(0, "http://server0", 0, False)
    waiting = asyncio.create_task(client.schedule(request_of("q"), 30))
    await held(manager, lambda: len(manager.service.routes.changed._waiters))
    waiting.cancel()
    client.release("q")
    await client.flush()
    manager.serve(0)
    await held(manager, lambda: manager.service.router.placed)
    await held(manager, lambda: manager.service.router.placed == 0)


async def test_a_worker_that_was_silent_while_a_grant_was_under_way_asks_for_others(manager: Manager) -> None:
    """The reply came too late, so the call is repeated; what it granted was given up meanwhile."""
    client = manager.client()
    await client.allocate(["a"], timeout_s=30)
    manager.clock.now = 31.0
    manager.service.expire_workers()
    reply = await client.allocate(["a", "b"], timeout_s=30)
    assert reply.gone == ["a"]
    assert [grant.rollout_id for grant in reply.granted] == ["b"]
    assert [grant.order for grant in reply.granted] == [0]
    await manager.client("master_worker/0").call(EndReport(0))
    assert (await client.allocate(["b"], timeout_s=30)).gone == ["b"]


async def test_asking_at_a_closed_gate_is_held(manager: Manager) -> None:
    """Workers would ask again at once, hundreds of times a second, until the run ends."""
    client, master = manager.client(), manager.client("master_worker/0")
    await master.call(CloseGate())
    asking = asyncio.create_task(client.allocate(["a"], timeout_s=30))
    await held(manager, lambda: len(manager.service.admission.calls))
    assert not asking.done()
    assert (await manager.client().allocate([], timeout_s=0)).closed


async def test_closing_ends_the_wait_at_the_gate(manager: Manager) -> None:
    client, master = manager.client(), manager.client("master_worker/0")
    await client.allocate([*"abcd"], timeout_s=30)
    waiting = asyncio.create_task(client.allocate(["e"], timeout_s=30))
    await held(manager, lambda: len(manager.service.admission.calls))
    await master.call(CloseGate())
    reply = await waiting
    assert (reply.closed, reply.granted) == (True, [])


async def test_abandoning_balances_the_counts(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"abcd"], timeout_s=30)
    await accept(client, "a")
    counts = await manager.client("master_worker/0").call(EndReport(0))
    assert (counts.submitted, counts.abandoned, counts.running, counts.finished_untrained) == (4, 4, 0, 0)


async def test_lost_servers_are_told_to_those_who_watch(manager: Manager) -> None:
    client = manager.client()
    before = await client.lost_servers(-1, 5)
    assert before.urls == []
    waiting = asyncio.create_task(client.lost_servers(before.seq, 30))
    await held(manager, lambda: len(manager.service.routes.losses.changed._waiters))
    manager.service.routes.server_lost("http://server0")
    lost = await waiting
    assert (lost.seq, lost.urls) == (before.seq + 1, ["http://server0"])


async def test_a_report_brings_how_gate_and_servers_stand(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"abcd"], timeout_s=30)
    await accept(client, *"abc")
    manager.clock.now = 2.0
    await accept(client, "d")  # until now one ran
    manager.clock.now = 5.0
    reply = await manager.client("master_worker/0").call(ConsumedReport(0))
    assert (reply.idle_s, reply.versions_in_use) == (3.0, [3, 4])


async def test_the_status_has_a_line_for_people(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"abcd"], timeout_s=30)
    manager.clock.now = 3.0
    status = await client.call(StatusRequest())
    assert status.gate.idle_s == 0.0, "rollouts run"
    assert status.describe().startswith("gate: trained 0 + finished 0 + running 4 of 4 allowed at served version 0")


async def test_strangers_are_refused_and_counted(manager: Manager) -> None:
    for _ in range(2):
        with pytest.raises(HttpRefused, match="401"):
            await manager.client(token="wrong").call(StatusRequest())
    assert manager.http.refused == {"unauthorized": 2}


async def test_a_header_that_is_no_utf_8_is_a_strangers_too(manager: Manager) -> None:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(manager.url.rpartition(":")[2]), ssl=manager.security.client_context()
    )
    writer.write(b"GET /books HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xed\xa0\x80\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    assert manager.http.refused == {"unauthorized": 1}


WORKER = '"worker": "rollout_worker/0"'
REQUEST = '"request_id": "q", "rollout_id": null, "prompt_tokens": 1, "max_new_tokens": 1'


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/allocate_rollout", "{", 400, "Input data was truncated"),
        ("/allocate_rollout", "[]", 400, "$: expected object, got array"),
        ("/allocate_rollout", "{}", 400, "$: object missing required field worker"),
        (
            "/allocate_rollout",
            f'{{{WORKER}, "rollouts": ["a", 1]}}',
            400,
            "$.rollouts[1]: expected str, got int",
        ),
        ("/allocate_rollout", f'{{{WORKER}, "rolouts": []}}', 400, "$: object contains unknown field rolouts"),
        ("/finish_rollout", '{"worker": 3}', 400, "$.worker: expected str, got int"),
        (
            "/finish_rollout",
            f'{{{WORKER}, "finished": [{{"rollout_id": "a"}}]}}',
            400,
            "$.finished[0]: object missing required field accepted",
        ),
        (
            "/schedule_request",
            f'{{{WORKER}, "requests": [{{{REQUEST}, "n": -1}}]}}',
            400,
            "$.requests[0].n: expected int",
        ),
        ("/consumed", '{"version": 1, "trained": [], "dropped": [[]]}', 400, "$.dropped[0]: expected object"),
        ("/consumed", '{"version": 1, "trained": ["a"]}', 400, "$.trained[0]: expected object, got str"),
        ("/begin_run", '{"checkpoint": {"line": -1}}', 400, "$.checkpoint.line: expected int"),
        ("/wait_expiring", '{"version": 1, "timeout_s": "5"}', 400, "$.timeout_s: expected float, got str"),
        ("/lost_servers", f"{{{WORKER}}}", 400, "$: object missing required field after"),
        ("/nowhere", "{}", 404, "no such path: /nowhere"),
        ("/allocate_rollout", " " * (MAX_BODY_BYTES + 1), 413, "the body has more than 16777216 bytes"),
    ],
)
async def test_a_malformed_call_is_refused_with_what_is_wrong_and_changes_nothing(
    manager: Manager, path: str, body: str, status: int, error: str
) -> None:
    headers = {"Authorization": f"Bearer {manager.security.token}"}
    async with aiohttp.ClientSession(headers=headers, connector=trusting(manager)) as session:
        async with session.post(manager.url + path, data=body) as reply:
            assert reply.status == status
            assert (await reply.json())["error"].startswith(error)
        async with session.get(manager.url + "/health") as reply:
            assert reply.status == 200
    assert manager.counts().submitted == 0
    assert manager.service.router.placed == 0


async def test_a_report_of_twenty_thousand_drops_is_taken(manager: Manager) -> None:
    drops = [DroppedRollout(f"{number:032x}", "stale") for number in range(20_000)]
    reply = await manager.client("master_worker/0").call(ConsumedReport(1, [], drops))
    assert reply.counts.dropped == {}, "none of them is known"


async def test_a_manager_that_does_not_answer_is_given_up_in_time(manager: Manager) -> None:
    client = manager.client(retry_s=0.2)
    await manager.http.close()
    with pytest.raises(ManagerGone, match=r"given up after 0.2 s"):
        await client.call(StatusRequest())


async def test_metrics_are_open_and_tell_the_counts(manager: Manager) -> None:
    client = manager.client()
    await client.allocate([*"abc"], timeout_s=30)
    await accept(client, "a")
    client.finish([FinishedRollout("b", False, "all_equal")])
    await client.flush()
    await client.schedule(request_of("q", "c"), 5)
    async with (
        aiohttp.ClientSession(connector=trusting(manager)) as session,
        session.get(manager.url + "/metrics") as reply,
    ):
        text = await reply.text()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["asyncrl_rollouts_submitted_total",] == 3
    assert samples["asyncrl_rollouts_finished_untrained",] == 1
    assert samples["asyncrl_rollouts_dropped_total", "all_equal"] == 1
    assert samples["asyncrl_server_sequences", "0"] == 4
    assert samples["asyncrl_gate_limit",] == 4
    assert samples["asyncrl_tokens_finished_total",] == 7


async def test_no_rollout_is_admitted_before_it_is_known_where_the_run_stands(
    http_security: HttpSecurity, tmp_path: Path
) -> None:
    """A resumed run's gate would otherwise count as if nothing had been trained."""
    manager = Manager(http_security, tmp_path / "ledger")
    manager.url = await manager.http.start("127.0.0.1")
    manager.serve(0)
    client = manager.client()
    assert (await client.allocate(["a"], timeout_s=0.01)).granted == []
    waiting = asyncio.create_task(client.allocate([*"abcde"], timeout_s=30))
    await held(manager, lambda: len(manager.service.admission.calls))
    await manager.begin(RunBegin(version=6))
    assert not waiting.done()
    manager.serve(6)
    assert [grant.version for grant in (await waiting).granted] == [6] * 4
    await manager.close()


async def test_a_prompt_that_rests_is_granted_to_be_dropped_and_what_was_measured_is_in_the_checkpoint(
    manager: Manager,
) -> None:
    manager.service.rollouts.curriculum = Curriculum(0.2, 0.8, 1)
    client = manager.client()
    manager.service.rollouts.order, manager.service.rollouts.queue = DataOrder(2, 0), PromptQueue(2)
    prompts = [manager.service.rollouts.prompt_id(order) for order in range(4)]
    await client.allocate(["r0", "r1"], timeout_s=30)
    client.finish([FinishedRollout("r0", True, success=1.0), FinishedRollout("r1", False, "dull", success=0.5)])
    await client.flush()
    assert (await client.call(ReceivedReport([arrived("r0")]))).refused == []
    granted = (await client.allocate(["r2", "r3"], timeout_s=30)).granted
    assert {(grant.prompt_id, grant.skips) for grant in granted} == {
        (f"e1{prompts[0][2:]}", True),
        (f"e1{prompts[1][2:]}", False),
    }
    (skipped,) = [grant for grant in granted if grant.skips]
    client.finish([FinishedRollout(skipped.rollout_id, False, "curriculum")])
    await client.flush()
    reply = await client.call(ConsumedReport(1, [trained("r0")]))
    assert reply.checkpoint is not None
    rows = [int(prompt[3:]) for prompt in prompts[:2]]
    assert sorted(reply.checkpoint.curriculum) == sorted([[rows[0], 0, 1.0], [rows[1], 0, 0.5]])
    assert manager.given_up() == ["r1", skipped.rollout_id], "it is used: nobody tries it again in this epoch"
    assert reply.counts.dropped == {"dull": 1, "curriculum": 1}
