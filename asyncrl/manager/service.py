"""The GserverManager's state and verbs: gate, router, leases and returned prompts as one, without HTTP around them.

A verb takes its request and returns its reply (`asyncrl.manager.messages`). Those that may have to wait look again
whenever something changed that they depend on:

    allocate_rollout   waits for room at the gate, or for prompts that are given back
    schedule_request   waits for a server that takes requests at the wanted version
    wait_expiring      waits until a step can be taken without making a running rollout expire
    lost_servers       waits for a server to leave service unexpectedly

Rollouts that wait at the gate are admitted in the data order (`order`), whichever worker they belong to. One that says
what its `first` request will be has a server for it with its admission, under the rollout's id: half the calls.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from asyncrl.datasets.curriculum import Curriculum
from asyncrl.manager import messages as m
from asyncrl.manager.leases import WorkerLeases
from asyncrl.manager.numbered_log import NumberedLog
from asyncrl.manager.returned_prompts import ReturnedPrompts
from asyncrl.manager.router import Router, ServerView
from asyncrl.manager.staleness_gate import ABANDONED, WORKER_LOST, StalenessGate, Ticket
from asyncrl.manager.wakeup import Signal

MAX_HOLD_S = 60.0
"""Longest time that a request is held; a client that wants longer asks again."""
FIRST_ASK_S = 10.0
"""How long the first admission waits for a worker that has not asked yet."""
LOSSES_KEPT = 256


@dataclass(slots=True, eq=False)
class _AtGate:
    """An allocation that waits: what it wants and what it got."""

    worker: str
    wanted: list[m.WantedRollout]
    granted: list[m.GrantedRollout] = field(default_factory=list)


class ManagerService:
    """See the module's docstring. Not thread-safe: everything happens in one event loop.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        routing: routing policy.
        lease_s: seconds of silence after which a worker's rollouts are given up.
        place_first: admissions bring a server. Not where servers are drained: they would wait for what nobody sent yet.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        routing: str,
        lease_s: float,
        place_first: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gate = StalenessGate(batch_size, max_staleness)
        self.router = Router(routing)
        self.leases = WorkerLeases(lease_s)
        self.returned = ReturnedPrompts(after=time.time_ns() // 1_000_000)
        self.given_up = NumberedLog[str](after=time.time_ns() // 1_000_000)
        self.measured = NumberedLog[tuple[str, float]](after=time.time_ns() // 1_000_000)
        self.curriculum: Curriculum | None = None
        self.tokens_finished = 0
        self._place_first = place_first
        self._clock = clock
        self._begun = False
        self._absent: set[str] = set()
        self._absent_until = 0.0
        self._closed_since: float | None = None
        self._closed_s = 0.0
        self._at_gate: list[_AtGate] = []
        self._room = Signal()
        self._routes = Signal()
        self.progress = Signal()
        self._losses: deque[tuple[int, str]] = deque(maxlen=LOSSES_KEPT)
        self._loss_seq = 0
        self._loss = Signal()

    @property
    def gate_closed_s(self) -> float:
        """Seconds in which no rollout could have started."""
        return self._closed_s + (0.0 if self._closed_since is None else self._clock() - self._closed_since)

    def verbs(self) -> dict[str, m.Verb]:
        """What it answers: by path the request's type and the handler."""
        return {
            "/allocate_rollout": (m.AllocateRequest, self.allocate_rollout),
            "/schedule_request": (m.ScheduleRequest, self.schedule_request),
            "/lost_servers": (m.LostServersRequest, self.lost_servers),
            "/wait_expiring": (m.WaitExpiringRequest, self.wait_expiring),
            "/finish_rollout": (m.FinishRequest, self.finish_rollout),
            "/report_consumed": (m.ConsumedReport, self.report_consumed),
            "/close_gate": (m.Empty, self.close_gate),
            "/abandon": (m.Empty, self.abandon),
            "/books": (m.Empty, self.books),
        }

    async def allocate_rollout(self, request: m.AllocateRequest) -> m.AllocateReply:
        """Admit a prefix of the wanted rollouts; holds where there is nothing to tell.

        A call that finds the gate closed is held like any other, or workers would ask again without a pause.
        """
        for rollout in request.rollouts:
            self._was_given_up(rollout.rollout_id)  # a refused call changes nothing
        self._note_call(request)
        worker, deadline = request.worker, self._deadline(request.timeout_s)
        gone = [rollout.rollout_id for rollout in request.rollouts if self._was_given_up(rollout.rollout_id)]
        wanted = [rollout for rollout in request.rollouts if rollout.rollout_id not in gone]
        self.returned.acknowledge(worker, request.returned_ack)
        self._absent.discard(worker)
        waiting = _AtGate(worker, wanted)
        while wanted and self.gate.is_live(wanted[0].rollout_id):  # the reply to this call was lost once
            self._start(waiting)
        self._at_gate.append(waiting)
        closed_before = self.gate.closed
        try:
            self._admit()
            while not (waiting.granted or gone or self.returned.pending(worker) or self.gate.closed != closed_before):
                if not await self._room.wait(deadline - self._clock()):
                    break
        finally:
            self._at_gate.remove(waiting)
        returned = self.returned.pending(worker)
        return m.AllocateReply(waiting.granted, returned, self.gate.version, self.gate.closed, gone)

    async def schedule_request(self, request: m.ScheduleRequest) -> m.ScheduleReply:
        """Place the requests; holds while none of them can be."""
        self._note_call(request)
        worker, deadline = request.worker, self._deadline(request.timeout_s)
        while True:
            self.leases.renew(worker, self._clock())
            placed = [(each.request_id, self._place(each, worker)) for each in request.requests]
            scheduled = [
                m.ScheduledRequest(request_id, server.index, server.url, server.version)
                for request_id, server in placed
                if server is not None
            ]
            if scheduled or not request.requests or not await self._routes.wait(deadline - self._clock()):
                return m.ScheduleReply(scheduled)

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
        for dropped in request.dropped:
            self._drop(dropped.rollout_id, dropped.reason, dropped.return_prompt)
        for rollout_id in request.trained:
            self.router.release_rollout(rollout_id)
        self.gate.train(request.version, request.trained)
        self._admit()
        self.progress.notify()
        given_up = self.given_up.after(request.given_up_after)
        measured = self.measured.after(request.measured_after)
        return m.ConsumedReply(self.gate.books(), given_up, self.given_up.last_seq, measured, self.measured.last_seq)

    async def wait_expiring(self, request: m.WaitExpiringRequest) -> m.WaitExpiringReply:
        """Hold until the step can be taken without making a running rollout expire."""
        deadline = self._deadline(request.timeout_s)
        while True:
            running = self.gate.blocking(request.version)
            if not running or not await self.progress.wait(deadline - self._clock()):
                return m.WaitExpiringReply(not running, running)

    async def lost_servers(self, request: m.LostServersRequest) -> m.LostServersReply:
        """Hold until a server leaves service unexpectedly."""
        self._note_call(request)
        after, deadline = request.after, self._deadline(request.timeout_s)
        while True:
            self.leases.renew(request.worker, self._clock())
            urls = [] if after < 0 else [url for seq, url in self._losses if seq > after]
            if urls or after < 0 or not await self._loss.wait(deadline - self._clock()):
                return m.LostServersReply(self._loss_seq, urls)

    async def close_gate(self, request: m.Empty) -> m.Done:
        """No rollout starts from now on."""
        self.gate.close()
        self._room.notify()
        return m.Done()

    async def abandon(self, request: m.Empty) -> m.Books:
        """Every live rollout is abandoned; the final books."""
        self.gate.abandon()
        self._room.notify()
        self.progress.notify()
        return self.gate.books()

    async def books(self, request: m.Empty) -> m.Books:
        """The gate's ledger."""
        return self.gate.books()

    def gate_state(self) -> m.GateState:
        """Counters of the gate, and for how long it was closed."""
        books = structs.asdict(self.gate.books())
        return m.GateState(**books, limit=self.gate.limit, closed=self.gate.closed, closed_s=self.gate_closed_s)

    def routes_changed(self, served_version: int | None) -> None:
        """The router's servers changed; `served_version` is the least among those that take requests, if any does."""
        if served_version is not None and self.gate.advance(served_version):
            self._admit()
        self._routes.notify()

    def server_lost(self, url: str) -> None:
        """Requests at `url` may never be answered: tell their owners."""
        self._loss_seq += 1
        self._losses.append((self._loss_seq, url))
        self._loss.notify()

    def expire_workers(self) -> list[str]:
        """Give up the rollouts of workers whose lease has run out; returns their names."""
        late = self.leases.expired(self._clock())
        for worker in late:
            self.worker_died(worker)
        if self._absent and self._clock() > self._absent_until:
            self._absent.clear()
            self._admit()
        return late

    def worker_died(self, worker: str) -> None:
        """The worker is gone: its running rollouts are dropped, their prompts wait for its successor."""
        self.leases.end(worker)
        self._absent.discard(worker)
        for waiting in self._at_gate:
            if waiting.worker == worker:
                waiting.wanted.clear()
        self.router.release_worker(worker)
        self.returned.worker_died(worker)
        for rollout_id in self.gate.running_of(worker):
            self._left(rollout_id, self.gate.give_up(rollout_id), return_prompt=True)
        self._admit()
        self.progress.notify()

    def begin(self, version: int, workers: Iterable[str] = (), dropped: Mapping[str, int] | None = None) -> None:
        """The run starts (version 0) or goes on from a checkpoint at `version`; until then no rollout is admitted.

        `dropped`: by reason, what was dropped up to the checkpoint.

        The first ones are once each of `workers` has asked, for `FIRST_ASK_S` at most: else the first batch would be
        of whoever asks first, and not in the data order.
        """
        if version > 0:
            self.gate.resume(version, dropped)
        self._begun = True
        self._absent = set(workers) - {waiting.worker for waiting in self._at_gate}
        self._absent_until = self._clock() + FIRST_ASK_S
        self._admit()

    def _drop(
        self, rollout_id: str, reason: str, return_prompt: bool, *, as_next_attempt: bool = False
    ) -> Ticket | None:
        ticket = self.gate.drop(rollout_id, reason)
        self._left(rollout_id, ticket, return_prompt, as_next_attempt=as_next_attempt)
        return ticket

    def _left(
        self, rollout_id: str, ticket: Ticket | None, return_prompt: bool, *, as_next_attempt: bool = False
    ) -> None:
        """The rollout has left the count; `ticket` is None where it had before."""
        self.router.release_rollout(rollout_id)
        if ticket is not None and return_prompt:
            attempt = ticket.attempt + as_next_attempt
            self.returned.give_back(ticket.owner, ticket.prompt_id, ticket.order, attempt)
            self._room.notify()

    def _admit(self) -> None:
        """Start what waits at the gate, in the data order, while there is room; then see to the clock of the gate."""
        if self._at_gate and self._begun and not self._absent:
            self._admit_waiting()
        full = self.gate.capacity == 0
        if full and self._closed_since is None:
            self._closed_since = self._clock()
        elif not full and self._closed_since is not None:
            self._closed_s += self._clock() - self._closed_since
            self._closed_since = None

    def _admit_waiting(self) -> None:
        """Each call gets a prefix of its list; among the calls, the lowest order goes first."""
        heads = [(call.wanted[0].order, number) for number, call in enumerate(self._at_gate) if call.wanted]
        heapq.heapify(heads)
        admitted = False
        while heads and self.gate.capacity:
            _, number = heapq.heappop(heads)
            waiting = self._at_gate[number]
            self._start(waiting)
            admitted = True
            if waiting.wanted:
                heapq.heappush(heads, (waiting.wanted[0].order, number))
        if admitted:
            self._room.notify()

    def _start(self, waiting: _AtGate) -> None:
        """Admit the first rollout of a waiting call, unless another call of the same worker saw it to its end."""
        wanted = waiting.wanted.pop(0)
        rollout_id, worker, first = wanted.rollout_id, waiting.worker, wanted.first
        if self.gate.outcome(rollout_id) is not None:
            return
        version = self.gate.start(Ticket(rollout_id, worker, wanted.prompt_id, wanted.order, wanted.attempt))
        assert version is not None, "admitted without room"
        rests = self.curriculum is not None and self.curriculum.rests(wanted.prompt_id)
        route = None
        if first is not None and self._place_first and not rests:
            size = (first.prompt_tokens, first.max_new_tokens, first.n)
            request = m.RouteRequest(*size, request_id=rollout_id, rollout_id=rollout_id, affinity=rollout_id)
            server = self._place(request, worker)
            route = None if server is None else m.Route(server.url, server.version)
        waiting.granted.append(m.GrantedRollout(rollout_id, version, route, rests))
        self.returned.running_again(worker, wanted.prompt_id)

    def _was_given_up(self, rollout_id: str) -> bool:
        """Whether the rollout was granted, and given up before its worker knew.

        Raises:
            BadRequest: it was seen to its end.
        """
        outcome = self.gate.outcome(rollout_id)
        if outcome in (None, WORKER_LOST, ABANDONED):
            return outcome is not None
        raise m.BadRequest(f"rollout_id {rollout_id!r} was used before; give each attempt an id of its own")

    def _place(self, request: m.RouteRequest, worker: str) -> ServerView | None:
        """A server for the request; None where there is none now, or its rollout is over: nothing would release it."""
        min_version = request.min_version or 0
        if request.rollout_id is not None:
            if self.gate.has_ended(request.rollout_id):
                return None
            min_version = max(min_version, self.gate.admitted_at(request.rollout_id) or 0)
        return self.router.schedule(request, worker, min_version)

    def _note_call(self, request: m.WorkerRequest) -> None:
        """A worker calls: it lives, and tells which of its requests and rollouts ended."""
        self.leases.renew(request.worker, self._clock())
        for request_id in request.released:
            self.router.release(request_id)
        for finished in request.finished:
            self._finish(finished)
        if request.finished:
            self._admit()
        if request.released or request.finished:
            self.progress.notify()

    def _finish(self, finished: m.FinishedRollout) -> None:
        """A rollout ended: the trainer has it, or it is dropped."""
        rollout_id = finished.rollout_id
        if not finished.accepted:
            reason, again = finished.reason or "rejected", finished.as_next_attempt
            ticket = self._drop(rollout_id, reason, finished.return_prompt, as_next_attempt=again)
            self._measured(ticket, finished.success)
            if ticket is not None and not finished.return_prompt:
                self.given_up.add(ticket.prompt_id)
            return
        self.router.release_rollout(rollout_id)
        ticket = self.gate.finish(rollout_id)
        self._measured(ticket, finished.success)
        if ticket is not None:
            self.returned.running_again(ticket.owner, ticket.prompt_id)
            self.tokens_finished += finished.tokens

    def _measured(self, ticket: Ticket | None, success: float | None) -> None:
        """A rollout, not counted as ended before, had `success`."""
        if ticket is not None and success is not None and self.curriculum is not None:
            self.curriculum.measured(ticket.prompt_id, success)
            self.measured.add((ticket.prompt_id, success))

    def _deadline(self, hold_s: float) -> float:
        return self._clock() + min(hold_s, MAX_HOLD_S)
