"""Events of rollouts are reported until the master names their number, and agree with the books of the same reply."""

from __future__ import annotations

from collections import Counter

from asyncrl.comm.ended_rollouts.ledger_lines import Abandoned, Admitted, Dropped, Finished, PromptGoes, RolloutLine
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.live_rollouts import RolloutTicket
from asyncrl.manager.rollouts.rollout_events import NumberedLog, RolloutEvents, first_number
from asyncrl.manager.service import ManagerService
from asyncrl.plugins.datasets.queue.order import DataOrder

MASTER = "rollout_worker/0"


def test_a_line_is_told_until_its_number_is_named() -> None:
    events = RolloutEvents(after=100, now=lambda: 5.0)
    events.admitted(RolloutTicket("r1", MASTER, "e0-3", 7, 1), 2)
    events.finished("r1", 12)
    told = [Admitted("r1", "e0-3", 7, 1, MASTER, 2, 5.0), Finished("r1", 12, 5.0)]
    assert (events.unrecorded, events.last_seq) == (told, 102)
    events.forget(101)
    assert events.unrecorded == told[1:]
    events.forget(0)
    assert events.unrecorded == told[1:], "what was named is forgotten"
    events.dropped("r2", "stale", PromptGoes.returned)
    events.forget(102)
    assert events.unrecorded == [Dropped("r2", "stale", PromptGoes.returned, 5.0)]


def test_a_returned_prompt_alone_has_a_next_try_and_times_are_in_milliseconds() -> None:
    events = RolloutEvents(now=lambda: 1.23456)
    events.admitted(RolloutTicket("r1", MASTER, "e0-3", 7, 1, 2), 4)
    for goes in (PromptGoes.returned, PromptGoes.used):
        events.dropped("r1", "failed", goes, 1, 3)
    events.abandoned("r1")
    assert events.last_seq == 4
    assert events.unrecorded == [
        Admitted("r1", "e0-3", 7, 1, MASTER, 4, 1.235, 2),
        Dropped("r1", "failed", PromptGoes.returned, 1.235, 1, 3),
        Dropped("r1", "failed", PromptGoes.used, 1.235),
        Abandoned("r1", 1.235),
    ]


def test_a_managers_numbers_are_above_all_that_the_one_before_gave_out() -> None:
    before = NumberedLog[str](after=first_number(1))
    for _ in range(1000):
        before.add("x")
    assert first_number(0) == 0
    assert before.last_seq < first_number(2)


def service() -> ManagerService:
    made = ManagerService(batch_size=2, max_staleness=1, routing="round_robin", lease_s=60.0, order=DataOrder(100, 0))
    made.begin(m.RunReport())
    return made


async def admit(manager: ManagerService, *orders: int) -> None:
    await manager.allocate_rollout(m.AllocateRequest(worker=MASTER, rollouts=[f"r{order}" for order in orders]))


async def report(manager: ManagerService, version: int = 0, trained: tuple[str, ...] = ()) -> m.ConsumedReply:
    return await manager.report_consumed(m.ConsumedReport(version, list(trained), []))


async def receive(manager: ManagerService, order: int) -> list[str]:
    """The trainer has the rollout; return it if it does not count."""
    received = m.ReceivedRollout(f"r{order}", f"e0-{order}", order, 0, 9)
    return (await manager.received(m.ReceivedReport([received]))).refused


def finished(rollout: str, reason: str = "", *, again: bool = False) -> m.FinishRequest:
    end = m.FinishedRollout(rollout, accepted=not reason, reason=reason, return_prompt=again, tokens=9)
    return m.FinishRequest(worker=MASTER, finished=[end])


def kinds(lines: list[RolloutLine]) -> list[tuple[str, str]]:
    return [(type(line).__name__, line.rollout) for line in lines]


async def test_every_end_of_a_rollout_is_told_once_with_the_books_that_have_it() -> None:
    manager = service()
    await admit(manager, 0, 1, 2, 3)
    await admit(manager, 0, 1)  # its reply was lost
    for request in (finished("r0"), finished("r0"), finished("r1", "timeout"), finished("r2", "failed", again=True)):
        await manager.finish_rollout(request)
    for _ in range(2):
        assert await receive(manager, 0) == []
        await manager.finish_rollout(finished("r0", "failed"))
    await manager.abandon(m.Empty())
    reply = await report(manager)
    assert kinds(reply.events) == [
        *[("Admitted", f"r{order}") for order in range(4)],
        ("Dropped", "r1"),
        ("Dropped", "r2"),
        ("Finished", "r0"),
        ("Abandoned", "r0"),
        ("Abandoned", "r3"),
    ]
    drops = {line.rollout: line.prompt for line in reply.events if isinstance(line, Dropped)}
    assert drops == {"r1": PromptGoes.given_up, "r2": PromptGoes.returned}
    counted = Counter(type(line) for line in reply.events)
    books = reply.books
    assert (books.submitted, sum(books.dropped.values()), books.abandoned) == (
        counted[Admitted],
        counted[Dropped],
        counted[Abandoned],
    )


async def test_a_rollout_of_a_silent_worker_that_is_delivered_after_all_has_no_line_after_its_drop() -> None:
    manager = service()
    await admit(manager, 0)
    manager.worker_died(MASTER)
    await manager.finish_rollout(finished("r0"))
    assert await receive(manager, 0) == ["r0"]
    await manager.finish_rollout(finished("r0", "timeout"))
    reply = await report(manager, 0, ("r0",))
    assert kinds(reply.events) == [("Admitted", "r0"), ("Dropped", "r0")]
    assert reply.books.dropped == {"worker_died": 1}


async def test_a_report_forgets_the_lines_and_measurements_that_it_says_are_recorded() -> None:
    manager = service()
    await admit(manager, 0, 1)
    for rollout in ("r0", "r1"):
        ended = m.FinishedRollout(rollout, True, success=1.0)
        await manager.finish_rollout(m.FinishRequest(worker=MASTER, finished=[ended]))
    first = await report(manager)
    assert (len(first.events), len(first.measured)) == (2, 2)
    known = {"events_after": first.events_seq - 1, "measured_after": first.measured_seq - 1}
    second = await manager.report_consumed(m.ConsumedReport(0, [], [], **known))
    assert (second.events, second.measured) == (first.events[1:], first.measured[1:])


async def test_a_trained_rollout_has_no_later_line() -> None:
    manager = service()
    await admit(manager, 0)
    assert await receive(manager, 0) == []
    first = await report(manager, 1, ("r0",))
    await manager.finish_rollout(finished("r0"))
    assert await receive(manager, 0) == ["r0"], "a second copy"
    second = await manager.report_consumed(m.ConsumedReport(1, [], [], events_after=first.events_seq))
    assert second.events == []


def after(prompts: NumberedLog[str], seq: int) -> list[str]:
    prompts.forget(seq)
    return prompts.unrecorded


def test_a_prompt_is_told_until_its_number_is_named() -> None:
    prompts = NumberedLog[str](after=100)
    assert after(prompts, 0) == []
    prompts.add("a")
    prompts.add("b")
    assert after(prompts, 0) == ["a", "b"], "a lost reply loses none"
    assert prompts.last_seq == 102
    assert after(prompts, 0) == ["a", "b"]
    prompts.add("c")
    assert after(prompts, 102) == ["c"]
    assert after(prompts, 103) == []
    assert after(prompts, 102) == [], "forgotten"


def test_a_manager_that_was_restarted_tells_all_whatever_number_its_predecessor_came_to() -> None:
    prompts = NumberedLog[str](after=200)
    prompts.add("a")
    assert after(prompts, 102) == ["a"]
