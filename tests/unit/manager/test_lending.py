"""Workers that joined are lent prompts: each is in one place at a time, and comes back to its home if they go."""

from __future__ import annotations

import asyncio

from asyncrl.manager import messages as m
from asyncrl.manager.lending import Lenders
from asyncrl.manager.service import ManagerService
from asyncrl.manager.shards import Shards

HOME, JOINED, OTHER = "rollout_worker/0", "rollout_worker/2", "rollout_worker/3"
SHARDS = Shards(2)
LONG_S = 60.0


def rollouts(*orders: int, attempt: int = 0) -> list[m.WantedRollout]:
    """Rollouts of prompts of the shard of `HOME`, which are named by their order."""
    return [m.WantedRollout(f"r{order}", f"e0-{order}", order, None, attempt) for order in orders]


class Run:
    """Two workers with shards, and as many that joined as call."""

    def __init__(self, batch_size: int = 8) -> None:
        self.service = ManagerService(
            batch_size=batch_size, max_staleness=1, routing="least_requests", lease_s=LONG_S, shards=SHARDS
        )
        self.service.begin(0)
        self.acks: dict[str, int] = {}

    async def ask(
        self, worker: str, wanted: list[m.WantedRollout], *, room: int = 0, incarnation: int = 0, timeout_s: float = 0.0
    ) -> m.AllocateReply:
        request = m.AllocateRequest(
            worker=worker,
            rollouts=wanted,
            room=room,
            incarnation=incarnation,
            timeout_s=timeout_s,
            returned_ack=self.acks.get(worker, 0),
        )
        reply = await self.service.allocate_rollout(request)
        self.acks[worker] = max([self.acks.get(worker, 0), *(each.seq for each in reply.returned)])
        return reply

    async def offer(self, offered: list[m.WantedRollout]) -> list[str]:
        return (await self.service.lend(m.LendRequest(worker=HOME, offered=offered))).lent

    async def lend(self, *orders: int, to: str = JOINED, attempt: int = 0) -> m.AllocateReply:
        """`to` is lent prompts of `HOME`."""
        asking = asyncio.create_task(self.ask(to, [], room=len(orders), timeout_s=LONG_S))
        await asyncio.sleep(0)
        assert await self.offer(rollouts(*orders, attempt=attempt)) == [f"r{order}" for order in orders]
        return await asking

    async def end(self, worker: str, *ended: m.FinishedRollout) -> None:
        await self.service.finish_rollout(m.FinishRequest(worker=worker, finished=list(ended)))

    def owed_to(self, order: int) -> str | None:
        return self.service.returned.owed_to(f"e0-{order}")


async def test_lenders_are_asked_in_turn_for_what_nobody_was_asked_for_yet() -> None:
    room = 0
    lenders = Lenders(lambda: room)
    first, second = (asyncio.create_task(lenders.wait(name, LONG_S)) for name in "ab")
    await asyncio.sleep(0)
    room = 5
    lenders.ask()
    assert (await first, await second) == (3, 2)
    again = asyncio.create_task(lenders.wait("a", LONG_S))
    await asyncio.sleep(0)
    assert not again.done(), "all that there is room for was asked for"
    lenders.heard("b")  # who offered nothing
    lenders.ask()
    assert await again == 2
    waiting = asyncio.create_task(lenders.wait("c", LONG_S))
    await asyncio.sleep(0)
    lenders.gone("c")
    assert await waiting == 0
    assert await lenders.wait("d", 0.0) == 0


async def test_a_call_that_was_given_up_in_the_same_turn_of_the_loop_is_asked_for_nothing() -> None:
    """Its time is over, or its worker hung up, and it has not gone on since."""
    room = 0
    lenders = Lenders(lambda: room)
    calls = [asyncio.create_task(lenders.wait(name, LONG_S)) for name in "abc"]
    await asyncio.sleep(0)
    calls[0].cancel()
    lenders.gone("a")
    calls[1].cancel()
    room = 3
    lenders.ask()
    assert await calls[2] == 3, "all of it is asked of who waits"
    ended = await asyncio.gather(*calls[:2], return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2


async def test_who_has_a_shard_is_asked_once_there_is_room_and_none_before() -> None:
    run = Run()
    held = asyncio.create_task(run.service.lend(m.LendRequest(worker=HOME, timeout_s=LONG_S)))
    await run.ask(HOME, rollouts(0), room=3)
    assert not held.done(), "a worker with a shard is lent nothing"
    asking = asyncio.create_task(run.ask(JOINED, [], room=3, timeout_s=LONG_S))
    assert (await held).wanted == 3
    assert await run.offer(rollouts(2, 4, 6, 8)) == ["r2", "r4", "r6"]
    assert [each.prompt_id for each in (await asking).returned] == ["e0-2", "e0-4", "e0-6"]
    assert await run.offer(rollouts(2, 8)) == ["r2"], "an offer whose reply was lost is made again"


async def test_what_was_begun_is_not_lent_and_what_was_lent_is_begun_by_nobody_else() -> None:
    run = Run()
    await run.ask(HOME, rollouts(0))
    asking = asyncio.create_task(run.ask(JOINED, [], room=2, timeout_s=LONG_S))
    await asyncio.sleep(0)
    assert await run.offer(rollouts(0, 2)) == ["r2"]
    await asking
    assert (await run.ask(HOME, rollouts(2))).gone == ["r2"]
    stolen = m.WantedRollout("another", "e0-2", 2)
    for thief in (HOME, OTHER):
        assert (await run.ask(thief, [stolen])).gone == ["another"]
    theirs = m.WantedRollout("a third", "e0-2", 2)  # an id that was refused is used up
    assert [each.rollout_id for each in (await run.ask(JOINED, [theirs])).granted] == ["a third"]
    assert run.owed_to(2) is None
    assert run.service.gate.books().submitted == 2


async def test_a_lent_rollout_is_taken_out_of_the_call_that_waits_at_the_gate() -> None:
    run = Run(batch_size=1)
    await run.ask(HOME, rollouts(0, 2))  # all that may run
    waiting = asyncio.create_task(run.ask(HOME, rollouts(4, 6), timeout_s=LONG_S))
    await asyncio.sleep(0)
    await run.lend(4)
    await run.end(HOME, m.FinishedRollout("r0", False, "for the test"))
    assert [each.rollout_id for each in (await waiting).granted] == ["r6"]


async def test_what_a_worker_had_that_left_comes_back_to_its_home() -> None:
    run = Run()
    await run.lend(0, 2)
    begun = m.WantedRollout("begun", "e0-0", 0)
    assert (await run.ask(JOINED, [begun])).granted
    run.service.worker_died(JOINED)
    returned = (await run.ask(HOME, [])).returned
    assert {each.prompt_id for each in returned} == {"e0-0", "e0-2"}
    assert run.service.gate.books().dropped == {"worker_died": 1}
    assert (await run.ask(JOINED, [m.WantedRollout("late", "e0-2", 2)])).gone == ["late"], "it was silent, and is back"


async def test_the_successor_of_a_lender_knows_what_is_lent() -> None:
    run = Run()
    await run.lend(0, 2, attempt=1)
    assert (await run.ask(JOINED, [m.WantedRollout("begun", "e0-0", 0, None, 1)])).granted
    former = await run.service.take_over(m.TakeOverRequest(worker=HOME, incarnation=1))
    assert sorted((out.prompt_id, out.attempt) for out in former.out) == [("e0-0", 1), ("e0-2", 1)]
    neighbour = await run.service.take_over(m.TakeOverRequest(worker="rollout_worker/1", incarnation=1))
    assert neighbour.out == []


async def test_a_failure_is_tried_again_where_it_failed_and_another_attempt_by_its_home() -> None:
    run = Run()
    await run.lend(0, 2)
    assert len((await run.ask(JOINED, rollouts_of_its_own(0, 2))).granted) == 2
    await run.end(
        JOINED,
        m.FinishedRollout("own0", False, "failed", return_prompt=True),
        m.FinishedRollout("own2", False, "zero_variance", return_prompt=True, as_next_attempt=True),
    )
    assert (run.owed_to(0), run.owed_to(2)) == (JOINED, HOME)
    (again,) = (await run.ask(HOME, [])).returned
    assert again.attempt == 1


def rollouts_of_its_own(*orders: int) -> list[m.WantedRollout]:
    return [m.WantedRollout(f"own{order}", f"e0-{order}", order) for order in orders]


async def test_a_call_of_a_worker_that_left_is_given_no_server_and_no_prompt() -> None:
    """Its connection may break without the manager's learning of it."""
    run = Run()
    asking = asyncio.create_task(run.ask(JOINED, [], room=2, timeout_s=LONG_S))
    request = m.RouteRequest(1, 1, 1, request_id="q", rollout_id=None)
    scheduling = asyncio.create_task(
        run.service.schedule_request(m.ScheduleRequest(worker=JOINED, requests=[request], timeout_s=LONG_S))
    )
    await asyncio.sleep(0)
    run.service.worker_died(JOINED)
    assert await run.offer(rollouts(0)) == []
    run.service.router.update(0, "http://server", 0, True)
    run.service.routes_changed(0)
    assert (await scheduling).scheduled == []
    assert run.service.router.placed == 0
    assert run.service.leases.workers == [HOME]
    asking.cancel()


async def test_nothing_is_lent_once_no_rollout_starts_any_more() -> None:
    run = Run()
    asking = asyncio.create_task(run.ask(JOINED, [], room=1, timeout_s=LONG_S))
    await asyncio.sleep(0)
    await run.service.close_gate(m.Empty())
    assert await run.offer(rollouts(0)) == []
    assert (await asking).closed
