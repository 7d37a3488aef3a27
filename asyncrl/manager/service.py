"""The GserverManager's verbs: rollouts' books, admission, router and leases as one, without HTTP around them.

What must never be forgotten is in `rollout_books`, which change by its inputs alone; each is on the disk (`event_log`)
before a reply is sent. So a service that is given the inputs of one that died goes on where that one stood
(`begin_again`): calls whose replies were lost are made again and answered as before. Its router begins empty: what
runs on the servers goes on there, and counts again with its next request.

A verb takes its request and returns its reply (`asyncrl.manager.messages`). Those that may have to wait look again
whenever something changed that they depend on:

    allocate_rollout   waits for room at the gate, or for prompts that are given back (`asyncrl.manager.admission`)
    lend               waits until a worker that joined has room for prompts (`asyncrl.manager.lending`)
    schedule_request   waits for a server that takes requests at the wanted version
    wait_expiring      waits until a step can be taken without making a running rollout expire
    lost_servers       waits for a server to leave service unexpectedly

Incarnations. A worker's process that died is followed by another of the same name and shard, its next incarnation.
Whatever is heard of that one first, a call or its status, ends the one before: its running rollouts are dropped
(`worker_died`), their prompts are returned to the worker, and its late calls are refused, but for what they tell of
rollouts that ended. So all running rollouts of a worker belong to one incarnation. The successor asks what its
predecessors have seen to (`take_over`) and then reads which prompts are used; between the two nothing is missed, as
the master writes that file before it reports a step here, and only its report takes a rollout or a prompt off the list.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from asyncrl.comm.remembered import ids_remembered
from asyncrl.manager import messages as m
from asyncrl.manager.admission import Admission
from asyncrl.manager.event_log import EventLog
from asyncrl.manager.gate_queue import GateQueue
from asyncrl.manager.leases import WorkerLeases
from asyncrl.manager.lending import Lending
from asyncrl.manager.lost_servers import LostServers
from asyncrl.manager.pacing import DeadlinePacing
from asyncrl.manager.rollout_books import (
    Abandoned,
    Began,
    Closed,
    Consumed,
    Died,
    Ended,
    Event,
    RolloutBooks,
    Served,
    Succeeded,
)
from asyncrl.manager.router import Router, ServerView
from asyncrl.manager.shards import NO_SHARDS, Shards
from asyncrl.manager.wakeup import Signal
from asyncrl.plugins.datasets.curriculum import Curriculum

MAX_HOLD_S = 60.0
"""Longest time that a request is held; a client that wants longer asks again."""


class ManagerService:
    """See the module's docstring. Not thread-safe: everything happens in one event loop.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        routing: routing policy.
        lease_s: seconds of silence after which a worker's rollouts are given up.
        place_first: admissions bring a server. Not where servers are drained: they would wait for what nobody sent yet.
        pacing: says how much of the gate's room is to be used now; None: all.
        clock: monotonic time in seconds.
        log_file: where the inputs are written; None: nowhere, and a service that dies is lost.
        shards: the workers' shards of the data order; those beyond them have joined.
        versions_in_use: those that servers serve or load, for who may delete weights.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        routing: str,
        lease_s: float,
        place_first: bool = True,
        pacing: DeadlinePacing | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_file: Path | None = None,
        shards: Shards = NO_SHARDS,
        versions_in_use: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.log = EventLog(log_file, lambda: self.rollouts.remember())
        self.rollouts = RolloutBooks(batch_size, max_staleness, self.log.note, shards=shards)
        self.gate, self.returned = self.rollouts.gate, self.rollouts.returned
        self.router = Router(routing, ids_remembered(batch_size, max_staleness))
        self.leases = WorkerLeases(lease_s)
        self._clock, self._versions_in_use = clock, versions_in_use
        calls = GateQueue(self.rollouts.suspects)
        self._lending = Lending(self.rollouts, calls, self._apply)
        self.admission = Admission(
            self.rollouts,
            calls,
            self._lending.lenders,
            self._place,
            self._apply,
            place_first=place_first,
            pacing=pacing,
            clock=clock,
        )
        self._routes = Signal()
        self.progress = Signal()
        self._losses = LostServers()

    def verbs(self) -> dict[str, m.Verb]:
        """What it answers: by path the request's type and the handler. A reply waits for its causes to be written."""
        verbs: dict[str, m.Verb] = {
            "/take_over": (m.TakeOverRequest, self.take_over),
            "/allocate_rollout": (m.AllocateRequest, self.allocate_rollout),
            "/lend": (m.LendRequest, self.lend),
            "/schedule_request": (m.ScheduleRequest, self.schedule_request),
            "/lost_servers": (m.LostServersRequest, self.lost_servers),
            "/wait_expiring": (m.WaitExpiringRequest, self.wait_expiring),
            "/finish_rollout": (m.FinishRequest, self.finish_rollout),
            "/report_consumed": (m.ConsumedReport, self.report_consumed),
            "/close_gate": (m.Empty, self.close_gate),
            "/abandon": (m.Empty, self.abandon),
            "/books": (m.Empty, self.books),
        }
        return {path: (kind, self._written_first(handler)) for path, (kind, handler) in verbs.items()}

    def _written_first(self, handler: Callable[[Any], Awaitable[m.Message]]) -> Callable[[Any], Awaitable[m.Message]]:
        async def answer(request: Any) -> m.Message:
            reply = await handler(request)
            await self.log.flush()
            return reply

        return answer

    async def take_over(self, request: m.TakeOverRequest) -> m.TakeOverReply:
        """A worker's process begins; what of its shard is out already, and what was given up."""
        self._note_call(request)
        out = self.rollouts.out_of(request.worker)
        return m.TakeOverReply(
            [m.OutPrompt(prompt_id, attempt) for prompt_id, attempt in out.items()],
            [given_up.prompt_id for given_up in self.rollouts.given_up.unrecorded],
        )

    async def allocate_rollout(self, request: m.AllocateRequest) -> m.AllocateReply:
        """Admit a prefix of the wanted rollouts; holds where there is nothing to tell."""
        for rollout in request.rollouts:
            self.admission.was_given_up(rollout.rollout_id)  # a refused call changes nothing
        self._note_call(request)
        return await self.admission.answer(request, self._deadline(request.timeout_s))

    async def lend(self, request: m.LendRequest) -> m.LendReply:
        """Lend what is offered to who has room; without an offer hold until somebody has."""
        self._note_call(request)
        return await self._lending.answer(request, min(request.timeout_s, MAX_HOLD_S))

    async def schedule_request(self, request: m.ScheduleRequest) -> m.ScheduleReply:
        """Place the requests; holds while none of them can be."""
        self._note_call(request)
        worker, deadline = request.worker, self._deadline(request.timeout_s)
        while not self._is_over(request) and self.leases.keep(worker, self._clock()):
            placed = [(each.request_id, self._place(each, worker)) for each in request.requests]
            scheduled = [
                m.ScheduledRequest(request_id, server.index, server.url, server.version)
                for request_id, server in placed
                if server is not None
            ]
            if scheduled or not request.requests or not await self._routes.wait(deadline - self._clock()):
                return m.ScheduleReply(scheduled)
        return m.ScheduleReply([])

    async def finish_rollout(self, request: m.FinishRequest) -> m.Done:
        """Take in what ended, where no other call tells it."""
        self._note_call(request)
        return m.Done()

    async def report_consumed(self, request: m.ConsumedReport) -> m.ConsumedReply:
        """The optimizer consumed rollouts, and dropped others; tells the books and what workers gave up.

        Raises:
            BadRequest: the report is of a version that cannot have been trained: what is admitted while version v is
                served suffices for v + η + 1 steps.
        """
        newest = max(self.gate.version, self.gate.trained_version) + self.gate.max_staleness + 1
        if request.version > newest:
            raise m.BadRequest(f"$.version: {request.version} cannot be trained yet, at most {newest} can")
        for rollout_id in [*request.trained, *(dropped.rollout_id for dropped in request.dropped)]:
            self.router.release_rollout(rollout_id)
        for dropped in request.dropped:
            self.admission.rollout_ended(dropped.rollout_id, kept=False)
        self._apply(Consumed(request))
        if request.trained:
            self.admission.batch_taken()
        self.admission.admit()
        self.progress.notify()
        given_up, events, measured = self.rollouts.given_up, self.rollouts.events, self.rollouts.measured
        return m.ConsumedReply(
            self.gate.books(),
            given_up.unrecorded,
            given_up.last_seq,
            events.untold,
            events.last_seq,
            measured.unrecorded,
            measured.last_seq,
            self.admission.idle_s,
            sorted(self._versions_in_use()),
        )

    async def wait_expiring(self, request: m.WaitExpiringRequest) -> m.WaitExpiringReply:
        """Hold until the step can be taken without making a running rollout expire."""
        deadline = self._deadline(request.timeout_s)
        while self.gate.is_blocked(request.version):
            if not await self.progress.wait(deadline - self._clock()):
                return m.WaitExpiringReply(False, self.gate.blocking(request.version))
        return m.WaitExpiringReply(True, [])

    async def lost_servers(self, request: m.LostServersRequest) -> m.LostServersReply:
        """Hold until a server leaves service unexpectedly."""
        self._note_call(request)
        after, deadline = request.after, self._deadline(request.timeout_s)
        while not self._is_over(request) and self.leases.keep(request.worker, self._clock()):
            urls = [] if after < 0 else self._losses.since(after)
            if urls or after < 0 or not await self._losses.changed.wait(deadline - self._clock()):
                return m.LostServersReply(self._losses.seq, urls)
        return m.LostServersReply(self._losses.seq, [])

    async def close_gate(self, request: m.Empty) -> m.Done:
        """No rollout starts from now on."""
        self._apply(Closed())
        self._tell_of_the_end()
        return m.Done()

    async def abandon(self, request: m.Empty) -> m.Books:
        """Every live rollout is abandoned; the final books."""
        self._apply(Abandoned())
        self._tell_of_the_end()
        self.progress.notify()
        return self.gate.books()

    async def books(self, request: m.Empty) -> m.Books:
        """The gate's ledger."""
        return self.gate.books()

    def gate_state(self) -> m.GateState:
        """Counters of the gate, and for how long it let no rollout run."""
        books = structs.asdict(self.gate.books())
        return m.GateState(**books, limit=self.gate.limit, closed=self.gate.closed, idle_s=self.admission.idle_s)

    def routes_changed(self, served_version: int | None) -> None:
        """The router's servers changed; `served_version` is the least among those that take requests, if any does."""
        if served_version is not None and served_version > self.gate.version:
            self._apply(Served(served_version))
            self.admission.admit()
        self._routes.notify()

    def server_lost(self, url: str) -> None:
        """Requests at `url` may never be answered: tell their owners."""
        self._losses.add(url, len(self.router))

    def expire_workers(self) -> list[str]:
        """Give up the rollouts of workers whose lease has run out; returns their names."""
        late = self.leases.expired(self._clock())
        for worker in late:
            self.worker_died(worker)
        self.admission.look_for_absent()
        return late

    def incarnation_seen(self, worker: str, incarnation: int, *, killed: bool = False) -> bool:
        """There is this incarnation of the worker; whether it is a new one, with which those before it are over. The
        launcher says whether the one before was `killed` from outside.
        """
        if incarnation <= self.rollouts.incarnations.get(worker, 0):
            return False
        self._ended(worker, Succeeded(worker, incarnation, killed))
        return True

    def worker_died(self, worker: str) -> None:
        """The worker's process is gone: its running rollouts are dropped, their prompts wait for its successor."""
        self._ended(worker, Died(worker))

    def _ended(self, worker: str, event: Died | Succeeded) -> None:
        self.leases.end(worker)
        self._lending.lenders.gone(worker)
        self.admission.gone(worker)
        self.router.release_worker(worker)
        for rollout_id in self._apply(event):
            self.router.release_rollout(rollout_id)
            self.admission.rollout_ended(rollout_id, kept=False)
        self.admission.admit()
        self.progress.notify()

    def begin_curriculum(self, curriculum: Curriculum) -> None:
        """Leave out what rests by `curriculum`, which knows what the master does."""
        for prompt_id, success in self.rollouts.measured.unrecorded:
            curriculum.measured(prompt_id, success)
        self.admission.curriculum = curriculum

    def begin(self, version: int, workers: Iterable[str] = (), dropped: Mapping[str, int] | None = None) -> None:
        """The run starts (version 0) or goes on from a checkpoint at `version`; until then no rollout is admitted.

        `workers` are waited for (`Admission.begin`). `dropped`: by reason, what was dropped up to the checkpoint.
        """
        self._apply(Began(version, dict(dropped or {}), time.time_ns() // 1_000_000))
        self.admission.begin(workers)

    def begin_again(self) -> bool:
        """Go on where the service before this one stood; False where there was none, or it had not begun.

        Its workers have a new lease, in which to be heard.

        Raises:
            ValueError: what it left is damaged.
        """
        for noted in self.log.read():
            self.rollouts.replay(noted)
        for owner in self.gate.owners | self.rollouts.incarnations.keys() | self.returned.workers:
            self.leases.renew(owner, self._clock())
        self.admission.begin_again()
        return self.rollouts.begun

    def _apply(self, event: Event) -> list[str]:
        """Take an input in, and wake the workers to which prompts are returned by it."""
        given_up = self.rollouts.apply(event)
        for worker in self.returned.take_told_more():
            for waiting in self.admission.calls.of_worker(worker):
                waiting.changed.notify()
        return given_up

    def _tell_of_the_end(self) -> None:
        for waiting in self.admission.calls.all():
            waiting.changed.notify()

    def _place(self, request: m.RouteRequest, worker: str) -> ServerView | None:
        """A server for the request; None where there is none now, or its rollout is over: nothing would release it."""
        min_version = request.min_version or 0
        if request.rollout_id is not None:
            if self.gate.has_ended(request.rollout_id):
                return None
            min_version = max(min_version, self.gate.admitted_at(request.rollout_id) or 0)
        return self.router.schedule(request, worker, min_version)

    def _note_call(self, request: m.WorkerRequest) -> None:
        """A worker calls: it lives, and tells which of its requests and rollouts ended.

        Raises:
            BadRequest: another process is the worker by now; what this one tells counts all the same.
        """
        self.incarnation_seen(request.worker, request.incarnation)
        if not self._is_over(request):
            self.leases.renew(request.worker, self._clock())
        for request_id in request.released:
            self.router.release(request_id)
        for finished in request.finished:
            self._finish(finished)
        if request.finished:
            self.admission.admit()
        if request.released or request.finished:
            self.progress.notify()
        if self._is_over(request):
            newest = self.rollouts.incarnations[request.worker]
            raise m.BadRequest(f"$.incarnation: {request.incarnation} of {request.worker} is over, {newest} is there")

    def _is_over(self, request: m.WorkerRequest) -> bool:
        """Whether another process is the worker by now."""
        return request.incarnation < self.rollouts.incarnations.get(request.worker, 0)

    def _finish(self, finished: m.FinishedRollout) -> None:
        """A rollout ended: the trainer has it, or it is dropped."""
        self.router.release_rollout(finished.rollout_id)
        before = self.rollouts.measured.last_seq
        self._apply(Ended(finished))
        self.admission.rollout_ended(finished.rollout_id, kept=finished.accepted)
        if self.admission.curriculum is not None and self.rollouts.measured.last_seq > before:
            self.admission.curriculum.measured(*self.rollouts.measured.unrecorded[-1])

    def _deadline(self, hold_s: float) -> float:
        return self._clock() + min(hold_s, MAX_HOLD_S)
