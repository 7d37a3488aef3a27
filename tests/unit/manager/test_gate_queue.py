"""Who is next at the gate, and that this costs the same however many wait."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.manager import messages as m
from asyncrl.manager.gate_queue import GateQueue, WaitingCall
from asyncrl.manager.service import ManagerService
from asyncrl.manager.suspects import Suspects
from asyncrl.manager.wakeup import Signal

PROMPTS = [f"p{number}" for number in range(6)]
PICK = st.integers(0, 10_000)


class AnyOrder(RuleBasedStateMachine):
    """The next is found as by a look at every call; suspects come, play and go meanwhile."""

    @initialize()
    def begin(self) -> None:
        self.in_hand: dict[str, list[str]] = {"w0": [], "w1": []}
        self.suspects = Suspects(self.in_hand.__getitem__)
        self.queue = GateQueue(self.suspects)
        self.calls: list[WaitingCall] = []
        self.names = iter(range(10**9))

    @rule(
        worker=st.sampled_from(["w0", "w1"]),
        wanted=st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, 9)), max_size=4),
    )
    def ask(self, worker: str, wanted: list[tuple[str, int]]) -> None:
        rollouts = [m.WantedRollout(f"r{next(self.names)}", prompt, order) for prompt, order in wanted]
        self.calls.append(WaitingCall(worker, rollouts))
        self.queue.add(self.calls[-1])

    @precondition(lambda self: self.calls)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.queue.remove(self.calls.pop(pick % len(self.calls)))

    @precondition(lambda self: self.calls)
    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        self.calls[pick % len(self.calls)].wanted.clear()

    @rule()
    def start(self) -> None:
        if (found := self.queue.next()) is not None:
            call, wanted = found
            call.wanted.remove(wanted)
            self.in_hand[call.worker].append(wanted.prompt_id)
            self.suspects.began(call.worker, wanted.prompt_id)

    @precondition(lambda self: any(call.wanted for call in self.calls))
    @rule(pick=PICK)
    def is_lent(self, pick: int) -> None:
        wanted = [(call.worker, each) for call in self.calls for each in call.wanted]
        worker, rollout = wanted[pick % len(wanted)]
        self.queue.withdraw(worker, rollout.rollout_id)

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(pick=PICK)
    def comes_to_its_end(self, pick: int) -> None:
        worker, prompt = self.played[pick % len(self.played)]
        self.suspects.ended(worker, prompt)
        self.in_hand[worker].remove(prompt)

    @property
    def played(self) -> list[tuple[str, str]]:
        return [(worker, prompt) for worker, prompts in self.in_hand.items() for prompt in prompts]

    @rule(worker=st.sampled_from(["w0", "w1"]), prompt=st.sampled_from(PROMPTS))
    def ends(self, worker: str, prompt: str) -> None:
        self.suspects.ended(worker, prompt)

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def dies(self, worker: str) -> None:
        self.suspects.died(worker, self.in_hand[worker])
        self.in_hand[worker].clear()

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def is_silent(self, worker: str) -> None:
        self.suspects.silent(worker)
        self.in_hand[worker].clear()

    @invariant()
    def the_lowest_order_that_may_begin_is_next(self) -> None:
        heads = []
        for call in self.calls:
            alone = [each for each in call.wanted if self.suspects.tried_alone(each.prompt_id)]
            allowed = (
                each for each in alone or call.wanted if not self.suspects.must_wait(call.worker, each.prompt_id)
            )
            if (head := next(allowed, None)) is not None:
                heads.append((head.order, call.number, call, head))
        found = self.queue.next()
        assert (found is None) == (not heads)
        if found is not None:
            assert found == min(heads, key=lambda each: each[:2])[2:]

    @invariant()
    def the_calls_of_a_worker_are_known(self) -> None:
        assert len(self.queue) == len(self.calls)
        for worker in ("w0", "w1"):
            assert self.queue.of_worker(worker) == [call for call in self.calls if call.worker == worker]
            assert (worker in self.queue) == any(call.worker == worker for call in self.calls)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_next_is_that_of_a_look_at_every_call = AnyOrder.TestCase


def test_calls_that_ended_leave_nothing_behind_at_a_closed_gate() -> None:
    queue = GateQueue(Suspects(lambda worker: []))
    for number in range(10_000):
        call = WaitingCall(f"w{number % 10}", [m.WantedRollout(f"r{number}", f"p{number}", number)])
        queue.add(call)
        if number >= 10:
            queue.remove(queue.all()[0])
    assert len(queue) == 10
    assert queue.entries <= 2 * 10 + 64


class CountedSignal(Signal):
    woken: ClassVar[int] = 0

    def notify(self) -> None:
        CountedSignal.woken += len(self._waiters)
        super().notify()


class CountedSuspects(Suspects):
    looks = 0

    def must_wait(self, worker: str, prompt_id: str) -> bool:
        self.looks += 1
        return super().must_wait(worker, prompt_id)


async def test_an_admission_looks_at_few_and_wakes_one_of_a_thousand_that_wait() -> None:
    workers = 1_000
    service = ManagerService(batch_size=4, max_staleness=0, routing="least_requests", lease_s=1e9)
    counted = CountedSuspects(service.gate.prompts_of)
    counted.died("w9", ["9-0"])
    service.rollouts.suspects = service.admission.calls._suspects = counted
    service.begin(0)

    async def ask(worker: int) -> m.AllocateReply:
        wanted = [m.WantedRollout(f"{worker}-{index}", f"{worker}-{index}", worker) for index in range(4)]
        request = m.AllocateRequest(worker=f"w{worker}", rollouts=wanted, timeout_s=60.0)
        return await service.allocate_rollout(request)

    first = await ask(0)
    assert len(first.granted) == 4
    held = [asyncio.create_task(ask(worker)) for worker in range(1, workers)]
    await asyncio.sleep(0)
    for waiting in service.admission.calls.all():
        waiting.changed.__class__ = CountedSignal
    before, CountedSignal.woken = counted.looks, 0
    ended = m.FinishedRollout("0-0", accepted=False, reason="rejected")
    await service.finish_rollout(m.FinishRequest(worker="w0", finished=[ended]))
    assert CountedSignal.woken == 1
    assert counted.looks - before < 10
    assert [grant.rollout_id for grant in (await held[0]).granted] == ["1-0"]
    for call in held:
        call.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_a_prompt_that_is_returned_wakes_its_own_worker_alone() -> None:
    service = ManagerService(batch_size=1, max_staleness=0, routing="least_requests", lease_s=1e9)
    service.begin(0)

    def asking(worker: str, rollout: str) -> m.AllocateRequest:
        return m.AllocateRequest(worker=worker, rollouts=[m.WantedRollout(rollout, rollout, 0)], timeout_s=60.0)

    await service.allocate_rollout(asking("w0", "a"))
    mine, other = (asyncio.create_task(service.allocate_rollout(asking(*who))) for who in (("w0", "b"), ("w1", "c")))
    await asyncio.sleep(0)
    service.gate.close()  # so that only the returned prompt is told
    ended = m.FinishedRollout("a", accepted=False, reason="rejected", return_prompt=True)
    await service.finish_rollout(m.FinishRequest(worker="w0", finished=[ended]))
    assert [returned.prompt_id for returned in (await mine).returned] == ["a"]
    await asyncio.sleep(0)
    assert not other.done()
    await service.close_gate(m.Empty())
    assert (await other).closed
