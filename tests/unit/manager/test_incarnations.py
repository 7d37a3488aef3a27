"""Workers and managers die and are followed by others, at any moment: no prompt or place is lost, none trained twice.

The manager's service, the trainer's buffer and the prompt streams are the real ones; processes, messages and the file
of used prompts are played.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.datasets.order import PromptRef, PromptStream
from asyncrl.manager import messages as m
from asyncrl.manager.rollout_books import Noted
from asyncrl.manager.service import ManagerService
from asyncrl.master.buffer import SampleBuffer
from asyncrl.master.settings import OnStale
from asyncrl.trainer.messages import RolloutRecord

ROWS, SHARDS, B, ETA = 7, 2, 2, 1
FAR = 1_000  # an epoch that no shard comes to
DECODER = msgspec.json.Decoder(Noted)
PICK = st.integers(0, 10_000)
SHARD = st.integers(0, SHARDS - 1)
_T = TypeVar("_T")


class Worker:
    """A RolloutWorker's process. `running`: by rollout what it plays, and the version that was admitted at."""

    def __init__(self, shard: int, incarnation: int) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.name = f"rollout_worker/{shard}"
        self.former: m.TakeOverReply | None = None
        self.stream: PromptStream | None = None
        self.wanted: list[tuple[str, PromptRef]] = []
        self.running: dict[str, tuple[PromptRef, int]] = {}
        self.ended: list[m.FinishedRollout] = []
        self.delivered: list[str] = []  # since the manager was heard last
        self.ack = 0

    def who(self) -> dict[str, Any]:
        return {"worker": self.name, "incarnation": self.incarnation, "finished": self.ended}


class Deaths(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.events: list[bytes] = []  # what the manager has written
        self.told = 0  # how many of them were written when a reply last arrived
        self.service = self.new_manager()
        self.service.begin(0)
        self.told = len(self.events)
        self.buffer = SampleBuffer(B, ETA, OnStale.drop)
        self.version = self.given_up_seq = 0
        self.disk: list[str] = []
        self.inbox: list[RolloutRecord] = []
        self.unreported: list[str] = []
        self.trained: list[str] = []
        self.given_up: set[str] = set()
        self.unheard: set[str] = set()  # prompts that the trainer has of workers that died before they said so
        self.ids = (f"r{number}" for number in itertools.count())
        self.dead: list[Worker] = []
        self.workers = [Worker(shard, 0) for shard in range(SHARDS)]
        self.highest = -1

    def new_manager(self) -> ManagerService:
        service = ManagerService(
            batch_size=B, max_staleness=ETA, routing="least_requests", lease_s=1e9, clock=lambda: 0.0
        )
        for event in map(DECODER.decode, self.events):
            service.rollouts.replay(event)
        service.rollouts._note = lambda event: self.events.append(msgspec.json.encode(event))
        return service

    @rule(cut_off=st.booleans(), remembered=st.booleans())
    def kill_the_manager(self, cut_off: bool, remembered: bool) -> None:
        """What it did since it last answered may not be written yet."""
        if cut_off:
            del self.events[self.told :]
        elif remembered:
            self.events = [msgspec.json.encode(Noted(0.0, self.service.rollouts.remember()))]
        before = self.service.rollouts.remember()
        self.service = self.new_manager()
        self.told = len(self.events)
        if not cut_off:
            assert self.service.rollouts.remember() == before

    def call(self, call: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(call)

    @rule(shard=SHARD)
    def take_over(self, shard: int) -> None:
        worker = self.workers[shard]
        if worker.former is None:
            worker.former = self.call(self.service.take_over(m.TakeOverRequest(**worker.who())))
            self.told = len(self.events)

    @rule(shard=SHARD)
    def read_used_prompts(self, shard: int) -> None:
        worker = self.workers[shard]
        if worker.former is not None and worker.stream is None:
            out = {prompt.prompt_id: prompt.attempt for prompt in worker.former.out}
            used = [*self.disk, *worker.former.given_up]
            worker.stream = PromptStream(ROWS, 0, shard, SHARDS, used=used, out=out)

    @rule(shard=SHARD, count=st.integers(1, 3), lost=st.booleans())
    def allocate(self, shard: int, count: int, lost: bool) -> None:
        worker = self.workers[shard]
        if worker.stream is None:
            return
        while len(worker.wanted) < count:
            ref = worker.stream.next()
            self.check_handed_out(ref.prompt_id)
            self.highest = max(self.highest, ref.order)
            worker.wanted.append((next(self.ids), ref))
        rollouts = [m.WantedRollout(name, ref.prompt_id, ref.order, None, ref.attempt) for name, ref in worker.wanted]
        request = m.AllocateRequest(**worker.who(), rollouts=rollouts, returned_ack=worker.ack)
        reply = self.call(self.service.allocate_rollout(request))
        if lost:
            return
        self.told = len(self.events)
        worker.ended, worker.delivered = [], []
        for returned in reply.returned:
            if returned.seq > worker.ack:
                worker.ack = returned.seq
                with contextlib.suppress(ValueError):  # trained meanwhile, which the data state knew first
                    worker.stream.give_back(returned.prompt_id, returned.attempt)
        refs = dict(worker.wanted)
        worker.running |= {grant.rollout_id: (refs[grant.rollout_id], grant.version) for grant in reply.granted}
        settled = {grant.rollout_id for grant in reply.granted} | set(reply.gone)
        worker.wanted = [item for item in worker.wanted if item[0] not in settled]

    def check_handed_out(self, prompt_id: str) -> None:
        """Nothing is played that is settled, or that the manager knows to be at the trainer.

        What the trainer has of a worker that died before it could say so may be; then it is a duplicate there.
        """
        assert prompt_id not in self.trained or prompt_id in self.unheard
        assert prompt_id not in self.given_up.union(self.service.rollouts.given_up.unrecorded)
        owners = [worker.name for worker in self.workers]
        assert prompt_id not in {t.prompt_id for name in owners for t in self.service.gate.finished_of(name)}

    @precondition(lambda self: any(worker.running for worker in self.workers))
    @rule(pick=PICK)
    def deliver(self, pick: int) -> None:
        """A rollout reaches the trainer, which acknowledges it."""
        worker, name = self.pick_running(pick)
        ref, version = worker.running.pop(name)
        sizes = {"lengths": (2,), "generated": (1,), "rewards": (1.0,), "truncated": (False,), "episodes": (1,)}
        tokens = {"oldest_version": version, "version_tokens": {version: 1}}
        self.inbox.append(
            RolloutRecord(rollout_id=name, prompt_id=ref.prompt_id, order=ref.order, head=0, **tokens, **sizes)
        )
        worker.ended.append(m.FinishedRollout(name, accepted=True))
        worker.delivered.append(ref.prompt_id)

    @precondition(lambda self: any(worker.running for worker in self.workers))
    @rule(pick=PICK, again=st.booleans())
    def reject(self, pick: int, again: bool) -> None:
        worker, name = self.pick_running(pick)
        worker.running.pop(name)
        worker.ended.append(m.FinishedRollout(name, False, "rejected", return_prompt=again, as_next_attempt=again))

    def pick_running(self, pick: int) -> tuple[Worker, str]:
        running = [(worker, name) for worker in self.workers for name in worker.running]
        return running[pick % len(running)]

    @rule(shard=SHARD, lost=st.booleans())
    def report(self, shard: int, lost: bool) -> None:
        worker = self.workers[shard]
        self.call(self.service.finish_rollout(m.FinishRequest(**worker.who())))
        if not lost:
            self.told = len(self.events)
            worker.ended, worker.delivered = [], []

    @rule(shard=SHARD, by_status=st.booleans())
    def kill(self, shard: int, by_status: bool) -> None:
        """Another process begins; the manager may see that in name resolution, or only when it calls."""
        worker = self.workers[shard]
        self.dead.append(worker)
        self.unheard.update(worker.delivered)
        self.workers[shard] = Worker(shard, worker.incarnation + 1)
        if by_status:
            self.service.incarnation_seen(worker.name, worker.incarnation + 1)

    @precondition(lambda self: self.dead)
    @rule(asks=st.booleans())
    def a_call_of_a_dead_worker_comes_late(self, asks: bool) -> None:
        worker = self.dead.pop(0)
        rollouts = [m.WantedRollout(next(self.ids), f"e{FAR}-0", FAR * ROWS)] if asks else []
        try:
            self.call(self.service.allocate_rollout(m.AllocateRequest(**worker.who(), rollouts=rollouts)))
        except m.BadRequest as refused:
            assert "is over" in str(refused)  # noqa: PT017  (it may be admitted where its successor was not seen yet)

    @rule()
    def collect(self) -> None:
        self.buffer.add(self.inbox)
        self.inbox = []

    @rule()
    def train(self) -> None:
        batch = self.buffer.take(self.version)
        if batch is not None:
            self.buffer.mark_trained(batch)
            self.trained += [record.prompt_id for record in batch.records]
            self.unreported += [record.rollout_id for record in batch.records]
            self.version += 1

    @rule()
    def report_step(self) -> None:
        self.disk = list(self.buffer.used)
        dropped = [drop.message for drop in self.buffer.pop_drops()]
        reply = self.call(
            self.service.report_consumed(m.ConsumedReport(self.version, self.unreported, dropped, self.given_up_seq))
        )
        self.told = len(self.events)
        self.unreported, self.given_up_seq = [], reply.seq
        self.buffer.give_up(reply.given_up)
        self.given_up |= set(reply.given_up)
        self.service.routes_changed(self.version)

    @invariant()
    def books_balance_and_nothing_is_trained_twice(self) -> None:
        assert self.service.gate.books().balanced
        assert len(self.trained) == len(set(self.trained))

    def teardown(self) -> None:
        """Let it go on without deaths: what was ever handed out comes to its end, and the gate has no place less."""
        if not hasattr(self, "runner"):
            return
        own = set(range(self.highest + 1))
        settled: set[int] = set()
        for turn in range(6 * (len(own) + 10)):
            for shard in ((0, 1), (1, 0))[turn % 2]:  # in turn, as whoever asks first finds the places
                worker = self.workers[shard]
                self.take_over(shard)
                self.read_used_prompts(shard)
                self.allocate(shard, 3, lost=False)
                while worker.running:
                    self.deliver(0)
                self.report(shard, lost=False)
            self.collect()
            self.train()
            self.report_step()
            settled = set(map(PromptStream(ROWS, 0).order_of, [*self.trained, *self.given_up]))
            if own <= settled:
                break
        assert own <= settled, "a prompt was lost"
        books = self.service.gate.books()
        assert (books.running, books.finished_untrained) == (0, len(self.buffer)), "the gate lost a place"
        self.runner.close()


Deaths.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
test_any_interleaving_of_deaths = Deaths.TestCase
