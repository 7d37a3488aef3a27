"""The GserverManager's verbs: rollouts' books, admission, router and leases as one, without HTTP around them.

What must never be forgotten is in `rollout_books`, which change by its inputs alone; each is on the disk (`event_log`)
before a reply is sent. So a service that is given the inputs of one that died goes on where that one stood
(`begin_again`): calls whose replies were lost are made again and answered as before. Its router begins empty: what
runs on the servers goes on there, and counts again with its next request.

A verb takes its request and returns its reply (`asyncrl.manager.messages`). Those that may have to wait look again
whenever something changed that they depend on:

    allocate_rollout   waits for room at the gate, and answers with what to play (`asyncrl.manager.admission`)
    schedule_request   waits for a server that takes requests at the wanted version
    wait_expiring      waits until a step can be taken without making a running rollout expire
    lost_servers       waits for a server to leave service unexpectedly

Incarnations. A worker's process that died is followed by another of the same name, its next incarnation. Whatever is
heard of that one first, a call or its status, ends the one before: its running rollouts are dropped (`worker_died`),
their prompts wait for any worker, and its late calls are refused, but for what they tell of rollouts that ended. So
all running rollouts of a worker belong to one incarnation.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from asyncrl.comm.recent_ids import ids_remembered
from asyncrl.manager import messages as m
from asyncrl.manager.admission import Admission
from asyncrl.manager.event_log import EventLog
from asyncrl.manager.pacing import DeadlinePacing
from asyncrl.manager.rollout_books import (
    Abandoned,
    Began,
    Closed,
    Consumed,
    Died,
    Ended,
    RolloutBooks,
    Served,
    Succeeded,
)
from asyncrl.manager.router import Router, ServerView
from asyncrl.manager.wakeup import Signal
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from asyncrl.plugins.datasets.queue.order import DataOrder
from asyncrl.plugins.datasets.queue.used_prompts import UsedPrompts

MAX_HOLD_S = 60.0
"""Longest time that a request is held; a client that wants longer asks again."""
LOSSES_AT_LEAST, LOSSES_PER_SERVER = 256, 4
"""Losses of servers that are remembered: of each server some lives, all of which may end within a pause of a worker."""


class ManagerService:
    """See the module's docstring. Not thread-safe: everything happens in one event loop.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        routing: routing policy.
        lease_s: seconds of silence after which a worker's rollouts are given up.
        order: of the prompts.
        first: the size that a rollout's first request is taken to have, so that admissions bring a server for it. None
            where servers are drained: they would wait for what nobody sent yet.
        pacing: says how much of the gate's room is to be used now; None: all.
        clock: monotonic time in seconds.
        log_file: where the inputs are written; None: nowhere, and a service that dies is lost.
        versions_in_use: those that servers serve or load, for who may delete weights.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        routing: str,
        lease_s: float,
        order: DataOrder,
        first: m.RequestSize | None = None,
        pacing: DeadlinePacing | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_file: Path | None = None,
        versions_in_use: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.log = EventLog(log_file, lambda: self.rollouts.remember())
        self.rollouts = RolloutBooks(batch_size, max_staleness, order, self.log.note)
        self.gate = self.rollouts.gate
        self.router = Router(routing, ids_remembered(batch_size, max_staleness))
        self.leases = WorkerLeases(lease_s)
        self._clock, self._versions_in_use = clock, versions_in_use
        self.admission = Admission(
            self.rollouts, self._place, self.rollouts.apply, first=first, pacing=pacing, clock=clock
        )
        self._routes = Signal()
        self.progress = Signal()
        self._losses = LostServers()

    def verbs(self) -> dict[str, m.Verb]:
        """Return the verbs that the manager answers: by path, the request's type and its handler. A reply waits until
        its causes are written.
        """
        verbs: dict[str, m.Verb] = {
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
        return {path: (kind, self._written_first(handler)) for path, (kind, handler) in verbs.items()}

    def _written_first(self, handler: Callable[[Any], Awaitable[m.Message]]) -> Callable[[Any], Awaitable[m.Message]]:
        async def answer(request: Any) -> m.Message:
            reply = await handler(request)
            await self.log.flush()
            return reply

        return answer

    async def allocate_rollout(self, request: m.AllocateRequest) -> m.AllocateReply:
        """Start rollouts for a prefix of the ids; holds where there is nothing to tell."""
        for rollout_id in request.rollouts:
            self.admission.was_given_up(rollout_id)  # a refused call changes nothing
        self._note_call(request)
        return await self.admission.answer(request, self._deadline(request.timeout_s))

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
        self.rollouts.apply(Consumed(request))
        if request.trained:
            self.admission.batch_taken()
        self.admission.admit()
        self.progress.notify()
        given_up, events, measured = self.rollouts.given_up, self.rollouts.events, self.rollouts.measured
        return m.ConsumedReply(
            self.gate.books(),
            given_up.unrecorded,
            given_up.last_seq,
            events.unrecorded,
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
        self.rollouts.apply(Closed())
        self.admission.tell_of_the_end()
        return m.Done()

    async def abandon(self, request: m.Empty) -> m.Books:
        """Every live rollout is abandoned; the final books."""
        self.rollouts.apply(Abandoned())
        self.admission.tell_of_the_end()
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
            self.rollouts.apply(Served(served_version))
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
        """The worker's process is gone: its running rollouts are dropped, their prompts wait for any worker."""
        self._ended(worker, Died(worker))

    def _ended(self, worker: str, event: Died | Succeeded) -> None:
        self.leases.end(worker)
        self.admission.gone(worker)
        self.router.release_worker(worker)
        for rollout_id in self.rollouts.apply(event):
            self.router.release_rollout(rollout_id)
            self.admission.rollout_ended(rollout_id, kept=False)
        self.admission.admit()
        self.progress.notify()

    def begin_curriculum(self, curriculum: Curriculum) -> None:
        """Leave out what rests by `curriculum`, which knows what the master does."""
        for prompt_id, success in self.rollouts.measured.unrecorded:
            curriculum.measured(prompt_id, success)
        self.admission.curriculum = curriculum

    def begin(self, version: int, dropped: Mapping[str, int] | None = None, used: UsedPrompts | None = None) -> None:
        """The run starts (version 0) or goes on from a checkpoint at `version`; until then no rollout is admitted.

        `dropped`: by reason, what was dropped up to the checkpoint. `used`: the prompts that were trained, or dropped
        for good, up to it.
        """
        known = None if used is None else used.to_json()
        self.rollouts.apply(Began(version, dict(dropped or {}), time.time_ns() // 1_000_000, known))
        self.admission.admit()

    def begin_again(self) -> bool:
        """Go on where the service before this one stood; False where there was none, or it had not begun.

        Its workers have a new lease, in which to be heard.

        Raises:
            ValueError: what it left is damaged.
        """
        for noted in self.log.read():
            self.rollouts.replay(noted)
        for owner in self.gate.owners | self.rollouts.incarnations.keys():
            self.leases.renew(owner, self._clock())
        self.admission.begin_again()
        return self.rollouts.begun

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
        """True if another process has replaced the worker that sent the request."""
        return request.incarnation < self.rollouts.incarnations.get(request.worker, 0)

    def _finish(self, finished: m.FinishedRollout) -> None:
        """A rollout ended: the trainer has it, or it is dropped."""
        self.router.release_rollout(finished.rollout_id)
        before = self.rollouts.measured.last_seq
        self.rollouts.apply(Ended(finished))
        self.admission.rollout_ended(finished.rollout_id, kept=finished.accepted)
        if self.admission.curriculum is not None and self.rollouts.measured.last_seq > before:
            self.admission.curriculum.measured(*self.rollouts.measured.unrecorded[-1])

    def _deadline(self, hold_s: float) -> float:
        return self._clock() + min(hold_s, MAX_HOLD_S)


class WorkerLeases:
    """A worker's lease is renewed by every call it makes and runs out after `lease_s` of silence.

    Pure state: the caller brings the clock, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._called_at: dict[str, float] = {}

    @property
    def workers(self) -> list[str]:
        """Every worker whose lease has not run out."""
        return list(self._called_at)

    def renew(self, worker: str, now: float) -> None:
        """`worker` is alive at `now`."""
        self._called_at[worker] = now

    def keep(self, worker: str, now: float) -> bool:
        """A call of `worker` is held, and looks again: it is alive, unless its lease has ended since; whether not."""
        if worker not in self._called_at:
            return False
        self._called_at[worker] = now
        return True

    def expired(self, now: float) -> list[str]:
        """Workers whose lease has run out; each is named once, until it calls again."""
        late = [worker for worker, called_at in self._called_at.items() if now - called_at > self._lease_s]
        for worker in late:
            del self._called_at[worker]
        return late

    def end(self, worker: str) -> None:
        """`worker` is known to be dead."""
        self._called_at.pop(worker, None)


class LostServers:
    """Servers that left service unexpectedly, numbered: each worker asks for those after the last that it was told.

    `changed`: there is one more.
    """

    def __init__(self) -> None:
        self.seq = time.time_ns() // 1_000_000  # above what a service before this one gave out
        """Number of the last."""
        self.changed = Signal()
        self._losses: OrderedDict[str, int] = OrderedDict()  # by URL the number of the last, ascending

    def __len__(self) -> int:
        """URLs that are remembered."""
        return len(self._losses)

    def add(self, url: str, servers: int) -> None:
        """Record that the server at `url` is lost; `servers` is the number of servers that remain known."""
        self.seq += 1
        self._losses.pop(url, None)
        self._losses[url] = self.seq
        if len(self._losses) > max(LOSSES_AT_LEAST, LOSSES_PER_SERVER * servers):
            self._losses.popitem(last=False)
        self.changed.notify()

    def since(self, after: int) -> list[str]:
        """URLs of those with a number above `after`, in the order in which they were lost."""
        newest_first = itertools.takewhile(lambda loss: loss[1] > after, reversed(self._losses.items()))
        return [url for url, _ in newest_first][::-1]
