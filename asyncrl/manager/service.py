"""The GserverManager's state and verbs: gate, router, leases and returned prompts as one, without HTTP around them.

A verb takes the JSON of its request as a dict and returns that of the reply. A worker's call is also its sign of life,
and tells in `released` and `finished` which of its requests and rollouts ended. Verbs that may have to wait are
coroutines and look again whenever something changed that they depend on:

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.manager.leases import WorkerLeases
from asyncrl.manager.returned_prompts import ReturnedPrompts
from asyncrl.manager.router import Router, RouteRequest
from asyncrl.manager.staleness_gate import WORKER_LOST, StalenessGate, Ticket
from asyncrl.manager.wakeup import Signal

MAX_HOLD_S = 60.0
"""Longest time that a request is held; a client that wants longer asks again."""
FIRST_ASK_S = 10.0
"""How long the first admission waits for a worker that has not asked yet."""
LOSSES_KEPT = 256

Json = dict[str, Any]


class BadRequest(ValueError):
    """The request is not one of this interface; the message says which field is wrong."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A rollout that waits, and the size of its first request where it is known."""

    ticket: Ticket
    first: Json | None


@dataclass(slots=True, eq=False)
class _AtGate:
    """An allocation that waits: what it wants and what it got."""

    worker: str
    wanted: list[_Wanted]
    granted: list[Json] = field(default_factory=list)


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

    async def allocate_rollout(self, body: Json) -> Json:
        """Admit a prefix of `rollouts`; holds for up to `timeout_s` where there is nothing to tell."""
        worker = self._hear(body)
        wanted = [
            _Wanted(Ticket(item["rollout_id"], worker, item["prompt_id"], item["order"]), item.get("first"))
            for item in body["rollouts"]
        ]
        ids = [each.ticket.rollout_id for each in wanted]
        used = next((rollout_id for rollout_id in ids if self.gate.has_left(rollout_id)), None)
        if used is not None:
            raise BadRequest(f"rollout_id {used!r} was used before; give each attempt an id of its own")
        self.returned.acknowledge(worker, body.get("returned_ack", 0))
        deadline = self._deadline(body)
        self._absent.discard(worker)
        waiting = _AtGate(worker, wanted)
        while wanted and self.gate.is_live(wanted[0].ticket.rollout_id):  # the reply to this call was lost once
            self._start(waiting)
        self._at_gate.append(waiting)
        try:
            self._admit()
            while not (waiting.granted or self.gate.closed or self.returned.pending(worker)):
                if not await self._room.wait(deadline - self._clock()):
                    break
        finally:
            self._at_gate.remove(waiting)
        return {
            "granted": waiting.granted,
            "returned": [
                {"seq": prompt.seq, "prompt_id": prompt.prompt_id, "order": prompt.order}
                for prompt in self.returned.pending(worker)
            ],
            "version": self.gate.version,
            "closed": self.gate.closed,
        }

    async def schedule_request(self, body: Json) -> Json:
        """Place `requests`; holds for up to `timeout_s` while none of them can be."""
        worker = self._hear(body)
        requests = [self._route_request(worker, item) for item in body["requests"]]
        deadline = self._deadline(body)
        while True:
            self.leases.renew(worker, self._clock())
            scheduled = []
            for request in requests:
                placement = self.router.schedule(request)
                if placement is not None:
                    scheduled.append(
                        {
                            "request_id": request.request_id,
                            "server": placement.server,
                            "url": placement.url,
                            "version": placement.version,
                        }
                    )
            if scheduled or not requests or not await self._routes.wait(deadline - self._clock()):
                return {"scheduled": scheduled}

    def finish_rollout(self, body: Json) -> Json:
        """Take in what ended, where no other call tells it."""
        self._hear(body)
        return {"ok": True}

    def report_consumed(self, body: Json) -> Json:
        """The optimizer consumed rollouts, and dropped others."""
        for item in body["dropped"]:
            self._drop(item["rollout_id"], item["reason"], item["return_prompt"])
        for rollout_id in body["trained"]:
            self.router.release_rollout(rollout_id)
        self.gate.train(body["version"], body["trained"])
        self._admit()
        self.progress.notify()
        return {"ok": True}

    async def wait_expiring(self, body: Json) -> Json:
        """Hold until step `version` can be taken without making a running rollout expire, up to `timeout_s`."""
        deadline = self._deadline(body)
        while True:
            running = self.gate.blocking(body["version"])
            if not running or not await self.progress.wait(deadline - self._clock()):
                return {"clear": not running, "running": running}

    async def lost_servers(self, body: Json) -> Json:
        """Hold until a server leaves service unexpectedly after loss `after`, up to `timeout_s`."""
        worker = self._hear(body)
        after = body["after"]
        deadline = self._deadline(body)
        while True:
            self.leases.renew(worker, self._clock())
            urls = [] if after < 0 else [url for seq, url in self._losses if seq > after]
            if urls or after < 0 or not await self._loss.wait(deadline - self._clock()):
                return {"seq": self._loss_seq, "urls": urls}

    def close_gate(self, body: Json) -> Json:
        """No rollout starts from now on."""
        self.gate.close()
        self._room.notify()
        return {"ok": True}

    def abandon(self, body: Json) -> Json:
        """Every live rollout is abandoned; the final books."""
        self.gate.abandon()
        self._room.notify()
        self.progress.notify()
        return self.books()

    def books(self) -> Json:
        """The gate's ledger."""
        books = self.gate.books()
        return {
            "submitted": books.submitted,
            "trained": books.trained,
            "dropped": books.dropped,
            "abandoned": books.abandoned,
            "running": books.running,
            "finished_untrained": books.finished_untrained,
            "version": books.version,
            "trained_version": books.trained_version,
        }

    def gate_status(self) -> Json:
        """Counters of the gate, and for how long it was closed, in seconds."""
        return {**self.books(), "limit": self.gate.limit, "closed": self.gate.closed, "closed_s": self.gate_closed_s}

    def routes_changed(self, served_version: int | None) -> None:
        """The router's servers changed; `served_version` is the least that requests are sent to, None where there is
        none.
        """
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
            self._drop(rollout_id, WORKER_LOST, return_prompt=True)
        self._admit()
        self.progress.notify()

    def begin(self, version: int, workers: Iterable[str] = ()) -> None:
        """The run starts (version 0) or goes on from a checkpoint at `version`; until then no rollout is admitted.

        The first ones are once each of `workers` has asked, for `FIRST_ASK_S` at most: else the first batch would be
        of whoever asks first, and not in the data order.
        """
        if version > 0:
            self.gate.resume(version)
        self._begun = True
        self._absent = set(workers) - {waiting.worker for waiting in self._at_gate}
        self._absent_until = self._clock() + FIRST_ASK_S
        self._admit()

    def _drop(self, rollout_id: str, reason: str, return_prompt: bool) -> None:
        ticket = self.gate.drop(rollout_id, reason)
        self.router.release_rollout(rollout_id)
        if ticket is not None and return_prompt:
            self.returned.give_back(ticket.owner, ticket.prompt_id, ticket.order)
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
        heads = [(call.wanted[0].ticket.order, number) for number, call in enumerate(self._at_gate) if call.wanted]
        heapq.heapify(heads)
        admitted = False
        while heads and self.gate.capacity:
            _, number = heapq.heappop(heads)
            waiting = self._at_gate[number]
            self._start(waiting)
            admitted = True
            if waiting.wanted:
                heapq.heappush(heads, (waiting.wanted[0].ticket.order, number))
        if admitted:
            self._room.notify()

    def _start(self, waiting: _AtGate) -> None:
        """Admit the first rollout of a waiting call, unless another call of the same worker saw it to its end."""
        wanted = waiting.wanted.pop(0)
        ticket = wanted.ticket
        if self.gate.has_left(ticket.rollout_id):
            return
        version = self.gate.start(ticket)
        assert version is not None, "admitted without room"
        route = self._place(ticket, wanted.first) if wanted.first is not None and self._place_first else None
        waiting.granted.append({"rollout_id": ticket.rollout_id, "version": version, "route": route})
        self.returned.running_again(ticket.owner, ticket.prompt_id)

    def _place(self, ticket: Ticket, first: Json) -> Json | None:
        """A server for the first request of a rollout just admitted; None where there is none now."""
        named = {"request_id": ticket.rollout_id, "rollout_id": ticket.rollout_id, "affinity": ticket.rollout_id}
        placement = self.router.schedule(self._route_request(ticket.owner, first | named))
        return None if placement is None else {"url": placement.url, "version": placement.version}

    def _hear(self, body: Json) -> str:
        """A worker calls: it lives, and tells which of its requests and rollouts ended. Returns its name."""
        worker: str = body["worker"]
        if not isinstance(worker, str):
            raise BadRequest(f"worker is {worker!r}; give the caller's name, for example 'rollout_worker/0'")
        self.leases.renew(worker, self._clock())
        released, finished = body.get("released", ()), body.get("finished", ())
        for request_id in released:
            self.router.release(request_id)
        for item in finished:
            self._finish(item)
        if finished:
            self._admit()
        if released or finished:
            self.progress.notify()
        return worker

    def _finish(self, item: Json) -> None:
        """A rollout ended: the trainer has it, or it is dropped."""
        rollout_id = item["rollout_id"]
        self.router.release_rollout(rollout_id)
        if not item["accepted"]:
            self._drop(rollout_id, item.get("reason") or "rejected", item.get("return_prompt", False))
            return
        ticket = self.gate.finish(rollout_id)
        if ticket is not None:
            self.returned.running_again(ticket.owner, ticket.prompt_id)
            self.tokens_finished += item.get("tokens", 0)

    def _route_request(self, worker: str, item: Json) -> RouteRequest:
        rollout_id = item["rollout_id"]
        admitted_at = None if rollout_id is None else self.gate.admitted_at(rollout_id)
        return RouteRequest(
            item["request_id"],
            worker,
            rollout_id,
            item["prompt_tokens"],
            item["max_new_tokens"],
            item["n"],
            item.get("affinity") or "",
            max(item.get("min_version") or 0, admitted_at or 0),
        )

    def _deadline(self, body: Json) -> float:
        hold_s: float = body.get("timeout_s", 0.0)
        return self._clock() + min(hold_s, MAX_HOLD_S)
