"""Waiting calls share the room of the gate in turn, and each is answered once, whatever became of its rollouts."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.comm.ended_rollouts import Admitted, RecentIds
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.prompt_queue import DataOrder, UsedPrompts
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.pacing import DeadlinePacing
from asyncrl.manager.rollouts.rollout_state import Admission, RolloutState
from asyncrl.manager.router import ServerView
from tests.recorded_lines import RecordedLines

FAR = 1e6


class Manager:
    """An open gate of `batch` rollouts per step at η = 0, and what answers its calls."""

    def __init__(self, batch: int = 2, first: m.RequestSize | None = None, begun: bool = True) -> None:
        self.now = 100.0
        self.lines = RecordedLines()
        self.rollouts = self.state(batch)
        self.server: ServerView | None = ServerView(0, "http://a", 7, routable=True)
        self.placed: list[tuple[m.RouteRequest, str]] = []
        self.admission = Admission(self.rollouts, self.place, first=first, pacing=None, clock=lambda: self.now)
        if begun:
            self.admission.begin(self.rollouts)

    def state(self, batch: int, ended: dict[str, str] | None = None, version: int = 0) -> RolloutState:
        known: RecentIds[str] = RecentIds(100)
        for rollout, outcome in (ended or {}).items():
            known.put(rollout, outcome)
        order = DataOrder(1000, 0, shuffle=False)
        return RolloutState(batch, 0, order, self.lines, version=version, ended=known)

    def place(self, request: m.RouteRequest, worker: str) -> ServerView | None:
        self.placed.append((request, worker))
        return self.server

    async def ask(self, worker: str, *rollouts: str, wait_s: float = 0.0) -> m.AllocateReply:
        request = m.AllocateRequest(worker=worker, rollouts=list(rollouts))
        return await self.admission.answer(request, self.now + wait_s)

    async def granted(self, worker: str, *rollouts: str, wait_s: float = 0.0) -> list[str]:
        return [each.rollout_id for each in (await self.ask(worker, *rollouts, wait_s=wait_s)).granted]

    async def waiting(self, worker: str, *rollouts: str) -> asyncio.Task[list[str]]:
        task = asyncio.create_task(self.granted(worker, *rollouts, wait_s=FAR))
        await asyncio.sleep(0)
        return task

    def train(self, version: int, *rollouts: str) -> None:
        for rollout in rollouts:
            assert self.rollouts.receive(rollout, 1)
        self.rollouts.train(version, [trained(each) for each in rollouts])
        self.rollouts.gate.advance(version)
        self.admission.admit()

    @property
    def admitted(self) -> list[str]:
        return [line.rollout for line in self.lines if isinstance(line, Admitted)]


def trained(rollout: str) -> m.TrainedRollout:
    return m.TrainedRollout(rollout, "", 0, {0: 1}, 1, 1, 1.0)


async def test_a_call_that_can_start_nothing_ends_nobody_elses_turn() -> None:
    manager = Manager(batch=4)
    first = await manager.granted("w0", *"abcd")
    gone, waits = await manager.waiting("w1", "e"), await manager.waiting("w2", "f", "g")
    manager.admission.worker_left("w1")
    manager.train(1, *first)
    assert await waits == ["f", "g"]
    assert not gone.done()
    gone.cancel()


async def test_new_room_is_spread_over_the_workers_that_wait() -> None:
    manager = Manager(batch=4)
    first = await manager.granted("w0", *"abcd")
    assert first == [*"abcd"]
    waits = [await manager.waiting("w1", "e", "f", "g"), await manager.waiting("w2", "h", "i", "j")]
    assert not any(task.done() for task in waits)
    manager.train(1, *first)
    assert [await task for task in waits] == [["e", "f"], ["h", "i"]]
    assert manager.admitted == [*"abcd", "e", "h", "f", "i"]
    assert not len(manager.admission.calls)


async def test_a_call_that_nothing_is_granted_to_ends_at_its_deadline() -> None:
    manager = Manager()
    assert await manager.granted("w0", *"abc") == ["a", "b"]
    reply = await asyncio.wait_for(manager.ask("w0", "c", wait_s=0.01), 60.0)
    assert (reply.granted, reply.gone, reply.closed, reply.version) == ([], [], False, 0)
    assert not len(manager.admission.calls)


async def test_before_the_state_is_rebuilt_nothing_is_admitted() -> None:
    manager = Manager(begun=False)
    assert await manager.granted("w0", "a") == []
    task = await manager.waiting("w0", "a")
    manager.admission.begin(manager.rollouts)
    manager.admission.admit()
    assert await task == ["a"]


async def test_a_call_whose_reply_was_lost_gets_the_same_rollouts_again() -> None:
    manager = Manager()
    assert await manager.granted("w0", *"abc") == ["a", "b"]
    manager.rollouts.finish(m.FinishedRollout("a", accepted=True))
    manager.rollouts.receive("b", 1)
    assert await manager.granted("w0", *"abc") == ["a"], "what the trainer has is not granted again"
    assert manager.admitted == ["a", "b"]


@pytest.mark.parametrize("accepted", [False, True])
async def test_two_calls_with_one_id_start_it_once(accepted: bool) -> None:
    manager = Manager()
    assert await manager.granted("w0", "a", "b") == ["a", "b"]
    earlier, later = await manager.waiting("w0", "c"), await manager.waiting("w0", "c", "d")
    manager.rollouts.finish(m.FinishedRollout("a", accepted=False, reason="failed"))
    manager.admission.admit()
    assert await earlier == ["c"]
    assert manager.admitted == ["a", "b", "c"]
    manager.rollouts.finish(m.FinishedRollout("b", accepted=False, reason="failed"))
    if accepted:
        manager.rollouts.receive("c", 1)
    else:
        manager.rollouts.finish(m.FinishedRollout("c", False, "failed"))
    manager.admission.admit()
    assert await later == ["d"]
    assert manager.admitted == ["a", "b", "c", "d"]


async def test_a_running_id_of_another_call_is_granted_to_both() -> None:
    manager = Manager(batch=1)
    assert await manager.granted("w0", "a") == ["a"]
    waits = [await manager.waiting("w0", "c"), await manager.waiting("w0", "c")]
    manager.train(1, "a")
    assert await waits[0] == ["c"]
    assert not waits[1].done(), "the gate is full again"
    manager.rollouts.gate.advance(2)
    manager.admission.admit()
    assert await waits[1] == ["c"]
    assert manager.admitted == ["a", "c"]


@pytest.mark.parametrize("how", ["lost", "abandoned", "lost before"])
async def test_ids_whose_rollouts_were_lost_are_gone_and_others_that_left_are_refused(how: str) -> None:
    manager = Manager()
    assert await manager.granted("w0", "a", "b") == ["a", "b"]
    if how == "lost":
        manager.rollouts.died("w0")
    elif how == "abandoned":
        manager.rollouts.end(0)
    else:
        manager.rollouts = manager.state(2, {"a": "worker_died"})
        manager.admission.begin(manager.rollouts)
    assert (await manager.ask("w0", "a", wait_s=FAR)).gone == ["a"], "at once"
    assert not manager.admission.is_gone("never")
    manager.rollouts.gate.drop("a", "failed")
    assert manager.admission.is_gone("a"), "how it left is final"
    manager.rollouts = manager.state(2, {"before": "failed", "trained before": "trained"})
    manager.admission.begin(manager.rollouts)
    for name in ("before", "trained before"):
        with pytest.raises(m.BadRequest, match=f"'{name}' was used before"):
            await manager.ask("w0", name)


async def test_a_call_that_waits_for_what_the_rebuilt_state_has_ended_is_told() -> None:
    manager = Manager(begun=False)
    reported = asyncio.create_task(manager.ask("w0", "a", "b", wait_s=FAR))
    waits = await manager.waiting("w1", "c")
    await asyncio.sleep(0)
    manager.admission.begin(manager.state(1, {"b": "worker_died"}, version=1))
    reply = await reported
    assert (reply.gone, reply.granted) == (["b"], [])
    assert not waits.done()
    waits.cancel()


async def test_the_end_of_the_run_answers_every_call_and_a_later_one_waits() -> None:
    manager = Manager(batch=1)
    assert await manager.granted("w0", "a") == ["a"]
    request = m.AllocateRequest(worker="w0", rollouts=["b"])
    task = asyncio.create_task(manager.admission.answer(request, manager.now + FAR))
    await asyncio.sleep(0)
    manager.rollouts.gate.close()
    manager.admission.tell_of_the_end()
    reply = await task
    assert (reply.granted, reply.closed) == ([], True)
    later = await manager.waiting("w0", "c")
    manager.admission.tell_of_the_end()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not later.done(), "else workers would repeat it without a pause"
    later.cancel()


async def test_the_room_that_a_lost_worker_waits_for_is_given_to_others() -> None:
    manager = Manager(batch=1)
    assert await manager.granted("w0", "a") == ["a"]
    lost, alive = await manager.waiting("w1", "b"), await manager.waiting("w2", "c")
    manager.admission.worker_left("w1")
    manager.train(1, "a")
    assert await alive == ["c"]
    assert not lost.done()
    lost.cancel()


async def test_an_admission_names_a_server_for_the_first_request_under_the_rollouts_id() -> None:
    manager = Manager(first=m.RequestSize(3, 4, 2))
    (granted,) = (await manager.ask("w0", "a")).granted
    assert granted.route == m.Route("http://a", 7)
    request = m.RouteRequest(3, 4, 2, request_id="a", rollout_id="a", affinity="a")
    assert manager.placed == [(request, "w0")]
    manager.server = None
    (granted,) = (await manager.ask("w0", "b")).granted
    assert granted.route is None, "none takes requests now"
    without = Manager()
    assert (await without.ask("w0", "a")).granted[0].route is None
    assert not without.placed


async def test_a_prompt_that_rests_is_granted_without_a_server() -> None:
    manager, curriculum = Manager(first=m.RequestSize(3, 4, 2)), Curriculum(0.0, 0.9, 1)
    curriculum.measured("e0-0", 1.0)
    checkpoint = m.GateCheckpoint(used=UsedPrompts(["e0-0"]).to_json())
    manager.rollouts = RolloutState(2, 0, DataOrder(1, 0), checkpoint=checkpoint, curriculum=curriculum)
    manager.admission.begin(manager.rollouts)
    reply = await manager.ask("w0", "a", "b")
    assert [(each.prompt_id, each.skips, each.route is None) for each in reply.granted] == [
        ("e1-0", True, True),
        ("e2-0", False, False),
    ]
    assert [request.rollout_id for request, _ in manager.placed] == ["b"]


async def test_a_grant_names_prompt_row_try_and_version() -> None:
    manager = Manager()
    await manager.granted("w0", "a", "b")
    again = m.FinishedRollout("a", False, "filtered", return_prompt=True, as_next_attempt=True)
    manager.rollouts.finish(again)
    failed = m.FinishedRollout("b", False, "failed", return_prompt=True)
    manager.rollouts.finish(failed)
    manager.rollouts.gate.advance(3)
    (granted,) = (await manager.ask("w1", "c")).granted
    assert granted == m.GrantedRollout("c", "e0-1", 1, 1, 0, 1, 3)


async def test_generation_is_idle_while_nothing_runs_and_the_gate_is_full() -> None:
    manager = Manager(batch=1)
    manager.admission.admit()
    manager.now += 5.0
    assert manager.admission.idle_s == 0.0, "the gate has room"
    await manager.granted("w0", "a")
    manager.now += 5.0
    assert manager.admission.idle_s == 0.0, "a rollout runs"
    manager.rollouts.receive("a", 1)
    manager.admission.admit()
    manager.now += 3.0
    manager.admission.admit()
    assert manager.admission.idle_s == 3.0
    manager.train(1, "a")
    manager.now += 7.0
    assert manager.admission.idle_s == 3.0
    await manager.granted("w0", "b")
    manager.rollouts.receive("b", 1)
    manager.admission.admit()
    manager.now += 2.0
    assert manager.admission.idle_s == 5.0


async def test_the_pacing_hears_of_every_start_and_end_once_and_lowers_the_room() -> None:
    manager, pacing = Manager(batch=4), DeadlinePacing(1, 4)
    admission = Admission(manager.rollouts, manager.place, first=None, pacing=pacing, clock=lambda: manager.now)
    manager.admission = admission
    admission.begin(manager.rollouts)
    assert await manager.granted("w0", *"abcd") == ["a", "b"], "two batches of one, of the four that the gate allows"
    manager.now += 8.0
    manager.rollouts.receive("a", 1)
    assert pacing.training is False
    admission.rollout_ended("a", kept=True)
    assert pacing.training, "the pacing's step begins with one finished rollout"
    assert (len(pacing._recent), pacing._recent.horizon) == (1, 8.0)
    manager.rollouts.train(1, [trained("a")])
    admission.batch_taken()
    assert not pacing.training
    admission.rollout_ended("b", kept=False)
    assert pacing._recent.share_kept == 1.0, "half of the rollouts, but at least one in a batch of one"
