"""A manager that begins has what all others know, and sees to who speaks while its gate is shut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from asyncrl.comm.ended_rollouts import Admitted, Finished, RolloutLine
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompt_queue import DataOrder, NextTry, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.rollout_state import NOBODY, RolloutState
from asyncrl.manager.rollouts.workers import PendingReports
from asyncrl.manager.service import ManagerService
from tests.recorded_lines import RecordedLines

WORKER, OTHER = "rollout_worker/0", "rollout_worker/1"
ORDER = DataOrder(7, 0, shuffle=False)


def call(service: ManagerService, path: str, **fields: Any) -> Any:
    kind, handler = service.methods()[path]
    return asyncio.run(handler(kind(**fields)))  # type: ignore[arg-type]


class Shut:
    """A manager whose gate is shut; the master has brought the checkpoint, and one worker is awaited."""

    def __init__(self, incarnation: int = 0, received: Sequence[m.ReceivedRollout] = ()) -> None:
        self.now, self.curriculum = 0.0, Curriculum(0.0, 1.0, 1)
        self.service = ManagerService(
            batch_size=2,
            max_staleness=0,
            routing="least_requests",
            lease_s=30.0,
            clock=lambda: self.now,
            order=DataOrder(4, 0, shuffle=False),
            number=2,
            curriculum=lambda state: self.curriculum,
        )
        self.service.await_workers({WORKER: incarnation})
        call(self.service, "/begin_run", received=list(received))

    def open_session(self, incarnation: int, *held: m.HeldRollout) -> None:
        call(self.service, "/open_session", worker=WORKER, incarnation=incarnation, held=list(held))


def held(rollout: str, end: m.FinishedRollout | None = None, version: int = 0) -> m.HeldRollout:
    return m.HeldRollout(m.GrantedRollout(rollout, f"e0-{rollout[1:]}", int(rollout[1:]), 0, 0, 0, version), end)


def received(rollout: str, order: int) -> m.ReceivedRollout:
    return m.ReceivedRollout(rollout, f"e0-{order}", order, 0, 5)


def rebuilt(
    *reports: m.HeldReport, trainer: list[m.ReceivedRollout] | None = None, used: str = ""
) -> tuple[RolloutState, list[RolloutLine], Curriculum]:
    """A state of a checkpoint with a `used` prompt, its lines, and its curriculum."""
    lines, curriculum = RecordedLines(), Curriculum(0.0, 1.0, 1)
    checkpoint = m.GateCheckpoint(used=UsedPrompts([used] if used else []).to_json())
    state = RolloutState(2, 1, ORDER, lines, lambda: 5.0, checkpoint=checkpoint, curriculum=curriculum)
    state.rebuild(trainer or [], reports)
    return state, lines, curriculum


def test_what_is_adopted_is_recorded_as_such_with_what_the_trainer_has_of_it() -> None:
    reports = [m.HeldReport(WORKER, 0, [held("r0"), held("r3")]), m.HeldReport(OTHER, 4, [held("r4", version=1)])]
    state, lines, _ = rebuilt(*reports, trainer=[received("r3", 3), received("r2", 2)])
    assert lines == [
        *[Admitted(f"r{order}", f"e0-{order}", order, 0, WORKER, 0, 5.0, adopted=True) for order in (0, 3)],
        Admitted("r4", "e0-4", 4, 0, OTHER, 1, 5.0, adopted=True),
        Finished("r3", 5, 5.0),
        Admitted("r2", "e0-2", 2, 0, NOBODY, 0, 5.0, adopted=True),
        Finished("r2", 5, 5.0),
    ]
    counts = state.gate.counts()
    assert (counts.submitted, counts.running, counts.finished_untrained) == (4, 2, 2)


def test_an_end_is_awaited_only_of_a_rollout_that_a_worker_holds() -> None:
    reported = m.FinishedRollout("r0", True, success=0.5)
    for reports, awaited in (([m.HeldReport(WORKER, 0, [held("r0")])], True), ([m.HeldReport(WORKER, 0, [])], False)):
        state, _, curriculum = rebuilt(*reports, trainer=[received("r0", 0)])
        assert state.awaits_ends is awaited
        state.finish(reported)
        assert not state.awaits_ends
        assert curriculum.state() == [(0, 0, 0.5)] * awaited
    state, _, curriculum = rebuilt(m.HeldReport(WORKER, 0, [held("r0", reported)]), trainer=[received("r0", 0)])
    assert not state.awaits_ends
    assert curriculum.state() == [(0, 0, 0.5)]


def test_what_the_trainer_has_counts_whatever_became_of_its_worker() -> None:
    failed = m.FinishedRollout("r0", False, "failed", return_prompt=True)
    for reports in (
        [],
        [m.HeldReport(WORKER)],
        *([m.HeldReport(WORKER, 0, [held("r0", end)])] for end in (None, failed)),
    ):
        state, lines, _ = rebuilt(*reports, trainer=[received("r0", 0)])
        counts = state.gate.counts()
        assert (counts.submitted, counts.running, counts.dropped, counts.finished_untrained) == (1, 0, {}, 1)
        assert [type(line) for line in lines] == [Admitted, Finished], "once in the ledger"


def test_an_end_that_no_manager_confirmed_is_applied_and_its_prompt_waits() -> None:
    again = m.FinishedRollout("r0", False, "too_hard", True, as_next_attempt=True)
    for_good = m.FinishedRollout("r1", False, "invalid_prompt")
    state, _, _ = rebuilt(m.HeldReport(WORKER, 0, [held("r0", again), held("r1", for_good)]))
    assert state.gate.counts().dropped == {"too_hard": 1, "invalid_prompt": 1}
    assert (state.queue.waiting(0), list(state.used)) == (NextTry(0, 1, 0), ["e0-1"])


@pytest.mark.parametrize("there", [True, False], ids=["the trainer has it", "it was freed, or arrived after the poll"])
def test_a_rollout_that_was_delivered_counts_only_if_the_trainer_has_it(there: bool) -> None:
    """Else nobody would ever end it: its worker does not hold it any more, once this report is answered."""
    shut = Shut(received=[received("r1", 1)] * there)
    shut.open_session(0, held("r1", m.FinishedRollout("r1", True, success=0.5)))
    assert shut.curriculum.state() == [(1, 0, 0.5)] * there
    counts = shut.service.gate.counts()
    assert (counts.submitted, counts.running, counts.finished_untrained) == (there, 0, there)
    assert shut.service.rollouts.queue.peek() == NextTry(0)
    assert (1 in shut.service.rollouts.queue.live) == there
    refused = call(shut.service, "/received", rollouts=[received("r1", 1)], manager=2).refused
    assert refused == ["r1"] * (not there)


def test_what_is_delivered_while_the_gate_is_shut_runs_until_the_trainer_says_that_it_has_it() -> None:
    """The ranks may have been polled before."""
    shut = Shut()
    shut.service.await_workers({WORKER: 0, OTHER: 0})
    shut.open_session(0, held("r1"))
    call(shut.service, "/finish_rollout", worker=WORKER, manager=2, finished=[m.FinishedRollout("r1", True)])
    call(shut.service, "/open_session", worker=OTHER)
    assert shut.service.begun
    assert shut.service.gate.counts().running == 1
    assert call(shut.service, "/received", rollouts=[received("r1", 1)], manager=2).refused == []
    assert shut.service.gate.counts().finished_untrained == 1


def test_a_worker_that_reports_after_the_gate_has_opened_brings_what_nobody_else_has() -> None:
    """Its lease was over. What it has delivered meanwhile was refused, and is played again."""
    shut = Shut()
    shut.now = 31.0
    shut.service.await_workers({WORKER: 0})
    assert shut.service.begun
    assert call(shut.service, "/received", rollouts=[received("r1", 1)], manager=2).refused == ["r1"]
    delivered = held("r3", m.FinishedRollout("r3", True))
    shut.open_session(0, held("r1"), held("r2"), delivered)
    assert list(shut.service.gate.live) == ["r2"]
    assert [shut.service.rollouts.queue.next() for _ in range(3)] == [NextTry(0), NextTry(1), NextTry(3)]


def test_an_end_of_which_the_worker_does_not_know_that_it_was_heard_is_heard_once() -> None:
    """Of the last manager, or while the gate is shut, or after it has opened."""
    end = m.FinishedRollout("r1", False, "too_hard", True, as_next_attempt=True)
    for late in (False, True):
        shut = Shut()
        if late:
            shut.now = 31.0
            shut.service.await_workers({WORKER: 0})
        assert shut.service.begun is late
        shut.open_session(0, held("r1", end), held("r2"))
        for _ in range(2):
            call(shut.service, "/finish_rollout", worker=WORKER, manager=2, finished=[end])
        assert shut.service.gate.counts().dropped == {"too_hard": 1}
        assert shut.service.rollouts.queue.waiting(1) == NextTry(1, 1, 0)
        assert list(shut.service.gate.live) == ["r2"]


def test_of_two_rollouts_of_a_prompt_one_that_its_worker_dropped_comes_last() -> None:
    """The other is its next try, whose admission the dead manager told nobody but its worker."""
    end = m.FinishedRollout("r0", False, "too_hard", True, as_next_attempt=True)
    again = m.HeldRollout(structs.replace(held("r0").granted, rollout_id="again", attempt=1))
    for reports, trainer in (
        ([m.HeldReport(WORKER, 0, [held("r0", end)]), m.HeldReport(OTHER, 0, [again])], []),
        ([m.HeldReport(WORKER, 0, [held("r0", end), again])], []),
        ([m.HeldReport(WORKER, 0, [held("r0", end)])], [received("again", 0)]),
    ):
        state, _, _ = rebuilt(*reports, trainer=trainer)
        assert list(state.gate.live) == ["again"]
        assert state.gate.counts().dropped == {}
        assert state.next_for(WORKER) == NextTry(1)


def test_of_two_rollouts_of_a_prompt_the_first_that_is_known_counts_and_the_other_changes_nothing() -> None:
    """The manager that died had given one of them up; only it could tell which."""
    again = m.HeldRollout(structs.replace(held("r0").granted, rollout_id="again"))
    first, second = m.HeldReport(WORKER, 0, [held("r0")]), m.HeldReport(OTHER, 0, [again])
    for reports, trainer, counts in (
        ([first, second], [], "r0"),
        ([second, first], [], "again"),
        ([first], [received("again", 0)], "r0"),
        ([], [received("again", 0), received("r0", 0)], "again"),
    ):
        state, _, _ = rebuilt(*reports, trainer=trainer)
        assert list(state.gate.live) == [counts]
        assert [state.receive(each, 5) for each in ("r0", "again")] == [counts == "r0", counts == "again"]
        assert state.gate.counts().submitted == 1


def test_a_prompt_that_the_checkpoint_has_as_used_is_not_played_by_a_rollout_that_someone_has() -> None:
    """Of two rollouts a step has trained one; the worker of the other, which was given up, plays on."""
    state, lines, _ = rebuilt(
        m.HeldReport(WORKER, 0, [held("r0")]), trainer=[received("r0", 0), received("again", 0)], used="e0-0"
    )
    assert (list(state.gate.live), lines) == ([], [])
    assert not state.receive("r0", 5)
    assert state.next_for(WORKER) == NextTry(1)


def test_the_roll_call_is_complete_once_the_master_and_every_awaited_process_have_spoken() -> None:
    call = PendingReports(until=30.0)
    call.run = m.RunBegin()
    assert not call.is_complete, "who is to be awaited is not known"
    call.await_workers({WORKER: 1, OTHER: 0}, 29.9)
    call.take(m.HeldReport(WORKER, 0, []))
    call.take(m.HeldReport(OTHER, 0, []))
    assert not call.is_complete, "another process of the first worker is there"
    call.take(m.HeldReport(WORKER, 2, []))
    assert call.is_complete
    call.run = None
    assert not call.is_complete
    call = PendingReports(until=30.0)
    call.run = m.RunBegin()
    call.await_workers({WORKER: 0}, 29.9)
    assert not call.is_complete
    call.await_workers({WORKER: 0}, 30.0)
    assert call.is_complete, "its lease is over"


def test_of_a_process_that_was_replaced_only_the_ends_count() -> None:
    call, end = PendingReports(), m.FinishedRollout("r0", True)
    call.take(m.HeldReport(WORKER, 1, [held("r2", version=3)]))
    call.take(m.HeldReport(WORKER, 0, [held("r0"), held("r1")]))
    call.take(m.HeldReport(OTHER, 4, [held("r5")]))
    assert [(each.worker, each.incarnation, each.held) for each in call.reports] == [
        (WORKER, 0, []),
        (WORKER, 1, [held("r2", version=3)]),
        (OTHER, 4, [held("r5")]),
    ]
    assert not call.has_ended("r0")
    call.finish(end)
    call.finish(m.FinishedRollout("r9", True))
    assert call.reports[0].held == [held("r0", end)]
    assert (call.has_ended("r0"), call.has_ended("r1"), call.has_ended("r9")) == (True, False, False)
    assert [call.admitted_at(name) for name in ("r2", "r0", "r9")] == [3, 0, 0]


@pytest.mark.parametrize("begun", [False, True], ids=["the gate is shut", "the gate is open"])
def test_the_first_report_of_each_process_counts_and_a_late_copy_brings_no_rollout(begun: bool) -> None:
    """A late copy lacks later grants and ends."""
    shut, end = Shut(), m.FinishedRollout("r1", False, "too_hard", True, as_next_attempt=True)
    shut.service.await_workers({} if begun else {WORKER: 1})
    assert shut.service.begun is begun
    shut.open_session(0, held("r1"), held("r2"))
    call(shut.service, "/finish_rollout", worker=WORKER, manager=2, finished=[end])
    shut.open_session(0, held("r1"), held("r2"), held("r3"))
    shut.service.await_workers({})
    assert list(shut.service.gate.live) == ["r2"]
    assert shut.service.gate.counts().dropped == {"too_hard": 1}
    shut.open_session(2, held("r3"))
    assert list(shut.service.gate.live) == ["r3"], "the rollouts of the process before it are lost"
    with pytest.raises(m.BadRequest, match="1 of rollout_worker/0 is over, 2 is there"):
        shut.open_session(1, held("r0"))
    assert list(shut.service.gate.live) == ["r3"]


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
    assert shut.service.workers.alive == [WORKER]
    shut.open_session(2)
    assert shut.service.workers.alive == [WORKER]
    shut.now = 31.0
    assert shut.service.expire_workers() == [WORKER]


def test_a_late_request_of_a_rollout_that_ended_while_the_gate_is_shut_loads_no_server() -> None:
    shut = Shut()
    service = shut.service
    service.await_workers({WORKER: 0, OTHER: 0})
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
    shut = Shut()
    shut.service.worker_died(WORKER)
    shut.open_session(0, m.HeldRollout(m.GrantedRollout("r1", "e0-0", 0, 0, 0, 0, 0)))
    assert shut.service.begun
    assert shut.service.gate.counts().running == 1


def test_a_call_for_a_rollout_that_died_with_the_manager_is_granted_as_the_gate_opens() -> None:
    """Its grant was never read, so the worker asks for it again, and does not hold it."""
    service = Shut().service
    service.await_workers({WORKER: 0, OTHER: 0})

    async def ask() -> m.AllocateReply:
        await service.open_session(m.HeldReport(WORKER))
        request = m.AllocateRequest(worker=WORKER, manager=2, rollouts=["r1"], timeout_s=60.0)
        asking = asyncio.ensure_future(service.allocate_rollout(request))
        await asyncio.sleep(0)
        assert not asking.done()
        await service.open_session(m.HeldReport(OTHER))
        assert service.begun
        return await asyncio.wait_for(asking, 5.0)

    reply = asyncio.run(ask())
    assert ([each.rollout_id for each in reply.granted], reply.gone) == (["r1"], [])


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
    service.begin(m.RunBegin())
    held = [m.HeldRollout(m.GrantedRollout("r1", "e0-0", 0, 0, 0, 0, 0))]
    with pytest.raises(m.BadRequest, match="rollout_worker/0 belongs to launch first, second is there"):
        await service.open_session(m.HeldReport(WORKER, 0, held, "first"))
    assert service.gate.counts().running == 0
    await service.open_session(m.HeldReport(WORKER, 0, held, "second"))
    assert service.gate.counts().running == 1


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
        service.begin(m.RunBegin())
    assert not service.begun
    service.begin(m.RunBegin())
    assert service.begun


def test_what_the_trainer_has_received_is_answered_once_the_state_is_rebuilt() -> None:
    """The manager that begins does not know before what counts."""
    shut = Shut()
    service, report = shut.service, m.ReceivedReport([received("r1", 1), received("r2", 2)], manager=2)

    async def ask() -> list[str]:
        asking = asyncio.ensure_future(service.received(report))
        await asyncio.sleep(0)
        assert not asking.done()
        await service.open_session(m.HeldReport(WORKER, 0, [held("r1")]))
        return (await asyncio.wait_for(asking, 5.0)).refused

    assert asyncio.run(ask()) == ["r2"]
    assert service.gate.counts().finished_untrained == 1


def test_what_was_received_is_told_to_the_manager_that_it_is_meant_for() -> None:
    shut = Shut()
    shut.open_session(0, held("r1"))
    with pytest.raises(m.SessionRequired, match="1 was the manager before, 2 is there"):
        call(shut.service, "/received", rollouts=[received("r1", 1)], manager=1)
    assert shut.service.gate.counts().running == 1


def test_what_the_trainer_has_loads_no_server_any_more() -> None:
    shut = Shut()
    service = shut.service
    service.router.update(0, "http://server", 0, routable=True)
    service.routes_changed(0)
    shut.open_session(0, held("r1"))
    caller = {"worker": WORKER, "manager": 2}
    request = m.RouteRequest(1, 1, 1, request_id="r1/0", rollout_id="r1")
    assert call(service, "/schedule_request", **caller, requests=[request]).scheduled
    assert call(service, "/received", rollouts=[received("r1", 1)], manager=2).refused == []
    assert service.router.placed == 0
    assert not call(service, "/schedule_request", **caller, requests=[request]).scheduled


def test_a_worker_that_was_given_up_still_gets_servers_until_it_ends_its_rollout() -> None:
    """It does not know, and would wait for ever; its trajectory is refused in the end."""
    shut = Shut()
    service = shut.service
    service.router.update(0, "http://server", 0, routable=True)
    service.routes_changed(0)
    shut.open_session(0, held("r1"))
    service.worker_died(WORKER)
    caller = {"worker": WORKER, "manager": 2}
    request = m.RouteRequest(1, 1, 1, request_id="r1/0", rollout_id="r1")
    assert call(service, "/schedule_request", **caller, requests=[request]).scheduled
    assert call(service, "/received", rollouts=[received("r1", 1)], manager=2).refused == ["r1"]
    call(service, "/finish_rollout", **caller, finished=[m.FinishedRollout("r1", True)])
    assert service.router.placed == 0
    assert not call(service, "/schedule_request", **caller, requests=[request]).scheduled, "a call that comes late"
    assert service.router.placed == 0
