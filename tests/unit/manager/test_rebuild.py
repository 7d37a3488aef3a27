"""A manager that is rebuilt has the state of the one before it, and sees to who speaks while its gate is shut."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from msgspec import structs

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.rebuild import Replaced, RollCall, rebuild
from asyncrl.manager.rollouts.rollout_state import RolloutState
from asyncrl.manager.rollouts.staleness_gate import GONE
from asyncrl.manager.service import ManagerService
from asyncrl.master.books.reports import Due, run_report
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.settings import OnStale
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.plugins.datasets.queue.prompt_queue import NextTry
from tests.unit.manager.test_any_schedule import BEGINNINGS, MOVES, ORDER, Schedule
from tests.unit.master.test_recorded import admitted, fold

WORKER = "rollout_worker/0"


def settle(schedule: Schedule) -> None:
    """All have been heard: what the manager knows now, others know too."""
    schedule.all_speak()
    for index in schedule.incarnations.keys() - {worker.index for worker in schedule.workers}:
        schedule.service.worker_died(f"rollout_worker/{index}")
    for pick, worker in enumerate(schedule.workers):
        schedule.report(pick, "answered")
        if worker.ids:
            schedule.allocate(pick, 0, "answered")
    schedule.collect()
    schedule.report_step()
    schedule.report_step()


def rebuilt(schedule: Schedule) -> RolloutState:
    trainer = schedule.trainer
    run = run_report(schedule.ledger.recorded, trainer.buffer, Curriculum(0.0, 1.0, 1), trainer.due, trainer.version)
    reports = [m.HeldReport(each.name, each.incarnation, each.held.all()) for each in schedule.workers]
    books = rebuild(RolloutState(schedule.batch, schedule.eta, ORDER), run, reports)
    books.gate.advance(schedule.service.gate.version)
    return books


def what_matters(books: RolloutState, orders: int) -> dict[str, Any]:
    gate, queue = books.gate, books.queue
    live = {key: (gate.live.ticket(key), gate.admitted_at(key), gate.has_ended(key)) for key in gate.live}
    used = [queue.is_used(order) for order in range(orders)]
    blocked = [(gate.is_blocked(step), sorted(gate.blocking(step))) for step in range(gate.trained_version, orders)]
    lost = sorted(rollout for rollout, outcome in gate._retired.items() if outcome in GONE)
    state = structs.asdict(gate.books()) | {"live": live, "lost": lost, "used": used, "blocked": blocked}
    state |= {"room": gate.capacity}
    return state | {"next": [queue.next() for _ in range(12)]}  # takes them: last


@pytest.mark.parametrize("seed", [0, 1, 2, 24, 31, 270])
def test_what_is_rebuilt_equals_the_state_of_the_manager_that_died(seed: int) -> None:
    random = Random(seed)
    schedule = Schedule()
    schedule.begin(**{name: random.choice(values) for name, values in BEGINNINGS.items()} | {"stops_early": True})
    often = {each.name: random.choice((0.1, 1, 5)) for each in MOVES} | {"allocate": 10.0}
    lives = 0
    for _ in range(30):
        for _ in range(5):
            possible = [each for each in MOVES if each.when(schedule)]
            (chosen,) = random.choices(possible, [often[each.name] for each in possible])
            getattr(schedule, chosen.name)(**{name: random.choice(values) for name, values in chosen.choices.items()})
        settle(schedule)
        books, lives = rebuilt(schedule), lives + len(schedule.service.gate.live)
        assert not books.events.unrecorded, "the ledger has it all"
        orders, dead = schedule.highest + 3, schedule.service.rollouts
        schedule.the_brain_dies()
        assert what_matters(books, orders) == what_matters(dead, orders)
    assert lives
    schedule.teardown()


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.verbs()[path]
    return asyncio.run(handler(kind(**fields)))  # type: ignore[arg-type]


class Shut:
    """A manager whose gate is shut, of a run in which `open` rollouts have begun; one worker is awaited."""

    def __init__(self, *admitted: Admitted, incarnation: int = 0) -> None:
        self.now = 0.0
        self.service = ManagerService(
            batch_size=2,
            max_staleness=0,
            routing="least_requests",
            lease_s=30.0,
            clock=lambda: self.now,
            order=DataOrder(4, 0),
            number=2,
        )
        self.incarnation = incarnation
        self.service.await_workers({WORKER: incarnation})
        call(self.service, "/report_run", open=list(admitted))

    def open_session(self, incarnation: int, *held: m.HeldRollout) -> None:
        call(self.service, "/open_session", worker=WORKER, incarnation=incarnation, held=list(held))


def granted(rollout: str) -> Admitted:
    return Admitted(rollout, "e0-0", 0, 0, WORKER, 0, 0.0)


def held(rollout: str, end: m.FinishedRollout | None = None, version: int = 0) -> m.HeldRollout:
    return m.HeldRollout(m.GrantedRollout(rollout, f"e0-{rollout[1:]}", int(rollout[1:]), 0, 0, 0, version), end)


def test_all_lines_of_what_is_adopted_reach_the_ledger_whatever_number_the_last_manager_came_to() -> None:
    """The report that was due for the last one names the number of its lines."""
    due = Due(trained=[m.ReceivedRollout("r2", "e0-2", 2, 0, 5)])
    recorded = fold(*map(admitted, range(2)))
    recorded.manager = 1
    run = run_report(recorded, SampleBuffer(2, 1, OnStale.drop), Curriculum(0.0, 1.0, 1), due, 1)
    assert (run.trained, run.trained_version, recorded.heard) == (due.trained, 1, 2)
    books = rebuild(RolloutState(2, 1, ORDER, manager=2), run, [m.HeldReport(WORKER, 0, [held("r0"), held("r3")])])
    lines = [(type(line).__name__, line.rollout) for line in books.events.unrecorded]
    assert lines == [("Admitted", "r2"), ("Finished", "r2"), ("Admitted", "r3"), ("Dropped", "r1")]
    assert books.events.last_seq == 4
    assert (books.gate.books().trained, books.gate.trained_version) == (1, 1)


def test_what_is_lost_is_written_by_worker() -> None:
    """Whoever reads the ledger of the same run again finds the same lines."""
    workers = [f"rollout_worker/{index}" for index in (3, 7, 1, 5, 0, 6, 2, 4)]
    lost = [structs.replace(granted(f"r{order}"), order=order, worker=each) for order, each in enumerate(workers[:7])]
    for reports in ([], [m.HeldReport(each, 0, []) for each in workers]):
        books = rebuild(RolloutState(7, 1, ORDER), m.RunReport(open=lost), reports)
        of_line = {each.rollout: each.worker for each in lost}
        written = [of_line[line.rollout] for line in books.events.unrecorded]
        assert written == sorted(of_line.values())


def received(rollout: str, order: int) -> m.ReceivedRollout:
    return m.ReceivedRollout(rollout, f"e0-{order}", order, 0, 5)


def reported(rollout: str, order: int, at: str) -> m.RunReport:
    """The ledger has admitted the rollout, and the trainer has it: the ledger says so, a rank, or the last step."""
    run = m.RunReport(open=[structs.replace(granted(rollout), prompt=f"e0-{order}", order=order)])
    if at == "ledger":
        return structs.replace(run, finished=[rollout])
    if at == "rank":
        return structs.replace(run, received=[received(rollout, order)])
    return structs.replace(run, trained=[received(rollout, order)], trained_version=1)


@pytest.mark.parametrize("at", ["ledger", "rank", "last step"])
def test_an_end_is_awaited_only_of_a_rollout_that_a_worker_holds(at: str) -> None:
    run, told = reported("r0", 0, at), m.FinishedRollout("r0", True, success=0.5)
    for reports, awaited in (([m.HeldReport(WORKER, 0, [held("r0")])], True), ([m.HeldReport(WORKER, 0, [])], False)):
        books = rebuild(RolloutState(1, 1, ORDER), run, reports)
        assert books.awaits_ends is awaited
        books.finish(told)
        assert not books.awaits_ends
        assert books.measured.unrecorded == [("e0-0", 0.5)] * awaited
    books = rebuild(RolloutState(1, 1, ORDER), run, [m.HeldReport(WORKER, 0, [held("r0", told)])])
    assert not books.awaits_ends
    assert books.measured.unrecorded == [("e0-0", 0.5)]


@pytest.mark.parametrize("at", ["ledger", "rank", "last step"])
def test_what_the_trainer_has_counts_whatever_became_of_its_worker(at: str) -> None:
    run = reported("r0", 0, at)
    for reports in ([], [m.HeldReport(WORKER, 0, [])], [m.HeldReport(WORKER, 0, [held("r0")])]):
        books = rebuild(RolloutState(1, 1, ORDER), run, reports)
        counters = books.gate.books()
        assert (counters.running, counters.dropped, counters.submitted) == (0, {}, 1)
        assert (counters.trained, counters.finished_untrained) == ((1, 0) if at == "last step" else (0, 1))
        lines = [type(line).__name__ for line in books.events.unrecorded]
        assert lines == ([] if at == "ledger" else ["Finished"]), "once in the ledger"


def test_a_rollout_that_its_worker_says_was_acknowledged_runs_until_the_trainer_says_that_it_has_it() -> None:
    """The ranks were polled before it arrived; its worker does not hold it any more, once this report is answered."""
    told = m.FinishedRollout("r0", True, tokens=5, success=0.5)
    books = rebuild(
        RolloutState(1, 1, ORDER), m.RunReport(open=[granted("r0")]), [m.HeldReport(WORKER, 0, [held("r0", told)])]
    )
    assert (books.gate.books().running, books.events.unrecorded) == (1, [])
    assert books.receive("r0", 5)
    assert (books.gate.books().finished_untrained, books.measured.unrecorded) == (1, [("e0-0", 0.5)])


def test_of_two_rollouts_of_a_prompt_the_first_that_is_known_counts_and_the_other_changes_nothing() -> None:
    """The manager that died had given one of them up, and told nobody; only it could tell which."""
    worker, other = [held("r0")], [m.HeldRollout(structs.replace(held("r0").granted, rollout_id="again"))]
    reports = [m.HeldReport(WORKER, 0, worker), m.HeldReport("rollout_worker/1", 0, other)]
    for run, counts in (
        (m.RunReport(), "r0"),
        (m.RunReport(open=[granted("r0")], received=[received("again", 0)]), "r0"),
        (m.RunReport(open=[granted("again")], received=[received("r0", 0)]), "again"),
    ):
        books = rebuild(RolloutState(1, 1, ORDER), run, reports)
        assert list(books.gate.live) == [counts]
        assert [books.receive(each, 5) for each in ("r0", "again")] == [counts == "r0", counts == "again"]
        assert books.gate.books().submitted == 1


def test_a_prompt_that_the_last_step_trained_is_not_played_by_another_rollout_of_it() -> None:
    """Of two rollouts, the ledger has the one that was given up, and the last step trained the other."""
    run = m.RunReport(open=[granted("r0")], trained=[received("again", 0)], trained_version=1)
    books = rebuild(RolloutState(1, 1, ORDER), run, [m.HeldReport(WORKER, 0, [held("r0")])])
    assert (list(books.gate.live), books.gate.outcome("r0")) == ([], "lost_with_manager")
    assert (books.gate.books().trained, books.queue.is_used(0)) == (1, True)
    assert not books.receive("r0", 5)
    assert books.next_for(WORKER) == NextTry(1)


def test_the_roll_call_is_complete_once_the_master_and_every_awaited_process_have_spoken() -> None:
    call = RollCall(until=30.0)
    call.run = m.RunReport()
    assert not call.is_complete, "who is to be awaited is not known"
    call.await_workers({WORKER: 1, "rollout_worker/1": 0}, 29.9)
    call.take(m.HeldReport(WORKER, 0, []))
    call.take(m.HeldReport("rollout_worker/1", 0, []))
    assert not call.is_complete, "another process of the first worker is there"
    call.take(m.HeldReport(WORKER, 2, []))
    assert call.is_complete
    call.run = None
    assert not call.is_complete
    call = RollCall(until=30.0)
    call.run = m.RunReport()
    call.await_workers({WORKER: 0}, 29.9)
    assert not call.is_complete
    call.await_workers({WORKER: 0}, 30.0)
    assert call.is_complete, "its lease is over"


def test_of_a_process_that_was_replaced_only_the_ends_count_and_a_first_report_does() -> None:
    call, end = RollCall(), m.FinishedRollout("r0", True, tokens=5)
    call.take(m.HeldReport(WORKER, 1, [held("r2", version=3)]))
    call.take(m.HeldReport(WORKER, 0, [held("r0"), held("r1")]))
    call.take(m.HeldReport("rollout_worker/1", 4, [held("r5")]))
    call.take(m.HeldReport("rollout_worker/1", 4, [held("r6")]))
    assert [(each.worker, each.incarnation, each.held) for each in call.reports] == [
        (WORKER, 0, []),
        (WORKER, 1, [held("r2", version=3)]),
        ("rollout_worker/1", 4, [held("r5")]),
    ]
    assert not call.has_ended("r0")
    call.finish(end)
    call.finish(m.FinishedRollout("r9", True))
    assert call.reports[0].held == [held("r0", end)]
    assert (call.has_ended("r0"), call.has_ended("r1"), call.has_ended("r9")) == (True, False, False)
    assert [call.admitted_at(name) for name in ("r2", "r0", "r9")] == [3, 0, 0]
    call.end(WORKER)
    call.end(Replaced(WORKER, 2, killed=False))
    assert call.ended == [WORKER, Replaced(WORKER, 2, killed=False)]
    assert call.replaced == {WORKER: 2}


def test_a_process_that_follows_a_dead_one_is_noted_once_while_the_gate_is_shut() -> None:
    """The manager sees it again at every look at name resolution."""
    shut = Shut(incarnation=1)
    assert shut.service.incarnation_seen(WORKER, 1)
    assert not shut.service.incarnation_seen(WORKER, 1)
    with pytest.raises(m.BadRequest, match="0 of rollout_worker/0 is over, 1 is there"):
        shut.open_session(0)
    assert not shut.service.begun


@pytest.mark.parametrize("seen_first", [True, False], ids=["seen first", "heard first"])
def test_a_process_that_follows_a_dead_one_has_a_lease_as_soon_as_it_has_spoken(seen_first: bool) -> None:
    shut = Shut(incarnation=1)
    if seen_first:
        shut.service.incarnation_seen(WORKER, 1)
    shut.open_session(1)
    shut.service.incarnation_seen(WORKER, 1)
    assert shut.service.begun
    assert shut.service.leases.workers == [WORKER]
    shut.open_session(2)
    assert shut.service.leases.workers == [WORKER]
    shut.now = 31.0
    assert shut.service.expire_workers() == [WORKER]


def test_a_late_request_of_a_rollout_that_ended_while_the_gate_is_shut_loads_no_server() -> None:
    shut = Shut(granted("r1"))
    service = shut.service
    service.await_workers({WORKER: 0, "rollout_worker/1": 0})
    service.router.update(0, "http://server", 0, routable=True)
    service.routes_changed(0)
    shut.open_session(0, m.HeldRollout(m.GrantedRollout("r1", "e0-0", 0, 0, 0, 0, 0)))
    caller = {"worker": WORKER, "manager": 2}
    request = m.RouteRequest(1, 1, 1, request_id="r1/0", rollout_id="r1")
    assert call(service, "/schedule_request", **caller, requests=[request]).scheduled
    ended = m.FinishedRollout("r1", False, "rejected")
    call(service, "/finish_rollout", **caller, finished=[ended])
    assert not call(service, "/schedule_request", **caller, requests=[request]).scheduled
    assert service.router.placed == 0
    assert not service.begun


def test_a_worker_that_was_silent_for_a_while_and_speaks_before_the_gate_opens_is_not_given_up() -> None:
    shut = Shut(granted("r1"))
    shut.service.worker_died(WORKER)
    shut.open_session(0, m.HeldRollout(m.GrantedRollout("r1", "e0-0", 0, 0, 0, 0, 0)))
    assert shut.service.begun
    assert shut.service.gate.books().running == 1


def test_a_call_that_waits_for_a_rollout_that_died_with_the_manager_is_told_as_the_gate_opens() -> None:
    """Its grant was never read, so the worker asks for it again, and does not hold it."""

    service = Shut(granted("r1")).service
    service.await_workers({WORKER: 0, "rollout_worker/1": 0})

    async def ask() -> m.AllocateReply:
        await service.open_session(m.HeldReport(WORKER))
        request = m.AllocateRequest(worker=WORKER, manager=2, rollouts=["r1"], timeout_s=60.0)
        asking = asyncio.ensure_future(service.allocate_rollout(request))
        await asyncio.sleep(0)
        await service.open_session(m.HeldReport("rollout_worker/1"))
        assert service.begun
        return await asyncio.wait_for(asking, 5.0)

    reply = asyncio.run(ask())
    assert (reply.granted, reply.gone) == ([], ["r1"])


async def test_a_worker_of_an_earlier_launch_opens_no_session() -> None:
    """A joined worker may outlive its launch; the rollouts that it holds were played again since."""
    service = ManagerService(
        batch_size=2,
        max_staleness=0,
        routing="least_requests",
        lease_s=30.0,
        order=DataOrder(4, 0),
        number=2,
        launch="second",
    )
    service.begin(m.RunReport())
    held = [m.HeldRollout(m.GrantedRollout("r1", "e0-0", 0, 0, 0, 0, 0))]
    with pytest.raises(m.BadRequest, match="rollout_worker/0 belongs to launch first, second is there"):
        await service.open_session(m.HeldReport(WORKER, 0, held, "first"))
    assert service.gate.books().running == 0
    await service.open_session(m.HeldReport(WORKER, 0, held, "second"))
    assert service.gate.books().running == 1


def test_a_curriculum_that_cannot_be_restored_leaves_the_manager_waiting_for_the_trainer() -> None:
    """A state of which only a part is rebuilt would admit nothing, without a word."""
    states = [ValueError("not this state"), None]

    def restored(state: Any) -> Curriculum:
        if (failure := states.pop(0)) is not None:
            raise failure
        return Curriculum(0.0, 1.0, 1)

    order = DataOrder(100, 0)
    service = ManagerService(
        batch_size=2, max_staleness=1, routing="round_robin", lease_s=60.0, order=order, curriculum=restored
    )
    with pytest.raises(ValueError, match="not this state"):
        service.begin(m.RunReport())
    assert not service.begun
    service.begin(m.RunReport())
    assert service.begun


def test_what_the_trainer_has_received_is_answered_once_the_state_is_rebuilt() -> None:
    """The manager that begins does not know before what counts."""
    shut = Shut(granted("r1"))
    service, report = shut.service, m.ReceivedReport([received("r1", 0), received("r2", 2)], manager=2)

    async def ask() -> list[str]:
        asking = asyncio.ensure_future(service.received(report))
        await asyncio.sleep(0)
        assert not asking.done()
        await service.open_session(m.HeldReport(WORKER, 0, [held("r1")]))
        return (await asyncio.wait_for(asking, 5.0)).refused

    assert asyncio.run(ask()) == ["r2"]
    assert service.gate.books().finished_untrained == 1


def test_what_was_received_is_told_to_the_manager_that_it_is_meant_for() -> None:
    shut = Shut(granted("r1"))
    shut.open_session(0, held("r1"))
    with pytest.raises(m.NotIntroduced, match="1 was the manager before, 2 is there"):
        call(shut.service, "/received", rollouts=[received("r1", 0)], manager=1)
    assert shut.service.gate.books().running == 1


def test_what_the_trainer_has_loads_no_server_any_more() -> None:
    shut = Shut(granted("r1"))
    service = shut.service
    service.router.update(0, "http://server", 0, routable=True)
    service.routes_changed(0)
    shut.open_session(0, held("r1"))
    caller = {"worker": WORKER, "manager": 2}
    request = m.RouteRequest(1, 1, 1, request_id="r1/0", rollout_id="r1")
    assert call(service, "/schedule_request", **caller, requests=[request]).scheduled
    assert call(service, "/received", rollouts=[received("r1", 0)], manager=2).refused == []
    assert service.router.placed == 0
    assert not call(service, "/schedule_request", **caller, requests=[request]).scheduled


def test_a_worker_that_was_given_up_still_gets_servers_until_it_ends_its_rollout() -> None:
    """It does not know, and would wait for ever; its trajectory is refused in the end."""
    shut = Shut(granted("r1"))
    service = shut.service
    service.router.update(0, "http://server", 0, routable=True)
    service.routes_changed(0)
    shut.open_session(0, held("r1"))
    service.worker_died(WORKER)
    caller = {"worker": WORKER, "manager": 2}
    request = m.RouteRequest(1, 1, 1, request_id="r1/0", rollout_id="r1")
    assert call(service, "/schedule_request", **caller, requests=[request]).scheduled
    assert call(service, "/received", rollouts=[received("r1", 0)], manager=2).refused == ["r1"]
    call(service, "/finish_rollout", **caller, finished=[m.FinishedRollout("r1", True)])
    assert service.router.placed == 0
