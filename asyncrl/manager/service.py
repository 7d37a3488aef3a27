"""The GserverManager's methods over rollout state, admission, router and leases, and HTTP around them.

From the gate to the ledger: `allocate_rollout` starts a rollout (`rollouts/rollout_state.py`) if
`rollouts/staleness_gate.py` has room. `received`, `consumed` and the ends that workers report with every call change
its state, and each change is a line of the ledger (`asyncrl.comm.ended_rollouts`).

The state that must not be lost is in `rollouts/`, with the ledger that says how it came about. A service begins with
reports (`rollouts/workers.py`): its gate is shut until the master and the workers have made theirs. Its router begins
empty: requests that run on the servers continue there, and count again from the rollout's next request on.

A method takes its request and returns its reply (`asyncrl.manager.messages`). Methods that may have to wait check again
whenever something that they depend on has changed:

    begin_run          the master brings the checkpoint from which the run continues, before its other calls
    open_session       a worker reports what it holds, before any other call
    allocate_rollout   waits for room at the gate, and answers with prompts to play (`rollouts/rollout_state.py`)
    schedule_request   waits for a server that takes requests at the wanted version
    wait_expiring      waits until a step can be taken without making a running rollout expire
    lost_servers       waits for a server to leave service unexpectedly
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CollectorRegistry

from asyncrl.comm.ended_rollouts import RecentIds, RolloutCounts, ids_remembered
from asyncrl.comm.http_server import Handler, HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.typed import json_decoder
from asyncrl.comm.waits import HOLD_S, Notifier
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.manager import messages as m
from asyncrl.manager.rollouts.rollout_state import Admission, Ledger, RolloutState
from asyncrl.manager.rollouts.staleness_gate import StalenessGate
from asyncrl.manager.rollouts.workers import EndedProcess, PendingReports, Workers, still_there
from asyncrl.manager.router import Caller, Router, Routes, ServerView

if TYPE_CHECKING:  # optional: only a run with a curriculum, or with `rollout.pacing=deadline`, loads them
    from asyncrl.data.curriculum import Curriculum
    from asyncrl.manager.rollouts.pacing import DeadlinePacing

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 * 2**20
"""Limit of all calls but the following. A call for ten thousand requests takes less than two megabytes."""
MAX_RUN_BYTES = 256 * 2**20
"""Limit of the master's report of the run. 100,000 live rollouts and 400,000 ended ones take 40 megabytes."""


class ManagerService:
    """Answers the methods. Not thread-safe: everything happens in one event loop.

    Args:
        batch_size: B, rollouts per train step.
        max_staleness: η, versions.
        lease_s: seconds of silence after which a worker's rollouts are dropped.
        number: grows from manager to manager of the launch.
        first: assumed size of a rollout's first request, so that admissions bring a server for it. None if servers are
            drained for updates: they would wait for requests that were not sent yet.
        pacing: limits how much of the gate's room is used now; None: no limit.
        versions_in_use: returns the versions that servers serve or load, whose weights must not be deleted.
        launch: launch that this process belongs to; "" accepts workers of any launch.
        curriculum: builds the curriculum from its state; None if there is no curriculum.
        ledger: records how every rollout ends; None: nothing does.
        policies: names of the policies besides the run's own that agents may ask.
        trained: names of those of them that are trained.
        online: clients bring the prompts, so no row is blamed for the death of a worker.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        routing: str,
        lease_s: float,
        order: DataOrder,
        number: int = 0,
        first: m.RequestSize | None = None,
        pacing: DeadlinePacing | None = None,
        clock: Callable[[], float] = time.monotonic,
        versions_in_use: Callable[[], Collection[int]] = tuple,
        launch: str = "",
        curriculum: Callable[[object], Curriculum] | None = None,
        ledger: Ledger | None = None,
        policies: Collection[str] = (),
        trained: Collection[str] = (),
        online: bool = False,
    ) -> None:
        self.number, self.launch, self._online = number, launch, online
        self.begun = False
        """The state is rebuilt, and the gate open."""
        self.pending_reports = PendingReports(clock() + lease_s)
        self.rollouts = RolloutState(batch_size, max_staleness, order)
        self.routes = Routes(routing, ids_remembered(batch_size, max_staleness), policies, trained, manager=number)
        self.workers = Workers(lease_s)
        self._clock, self._versions_in_use, self._make_curriculum = clock, versions_in_use, curriculum
        self._ledger, self._beginning = ledger, asyncio.Lock()
        self._ended: RecentIds[str] | None = None
        self._last_step: m.ConsumedReply | None = None
        self.admission = Admission(self.rollouts, self._place, first=first, pacing=pacing, clock=clock)
        self.progress = Notifier()

    @property
    def router(self) -> Router:
        """The router of the trained policy's servers."""
        return self.routes.router_of("")

    @property
    def gate(self) -> StalenessGate:
        """The staleness gate."""
        return self.rollouts.gate

    def methods(self) -> dict[str, m.Method]:
        """Return the methods that the manager answers: by path, the request's type and its handler."""
        methods: list[m.Method] = [
            (m.HeldReport, self.open_session),
            (m.RunBegin, self.begin_run),
            (m.AllocateRequest, self.allocate_rollout),
            (m.ScheduleRequest, self.schedule_request),
            (m.LostServersRequest, self.lost_servers),
            (m.WaitExpiringRequest, self.wait_expiring),
            (m.FinishRequest, self.finish_rollout),
            (m.ReceivedReport, self.received),
            (m.ConsumedReport, self.consumed),
            (m.CloseGate, self.close_gate),
            (m.EndReport, self.end_run),
        ]
        return {request.path: (request, handler) for request, handler in methods}

    async def open_session(self, request: m.HeldReport) -> m.Session:
        """Record all rollouts that a worker's process holds; its calls count from now on.

        Raises:
            BadRequest: a later process has replaced the worker, or the process belongs to an earlier launch of the run,
                whose rollouts no longer count.
        """
        if self.launch and request.launch not in ("", self.launch):
            raise m.BadRequest(f"$.launch: {request.worker} belongs to launch {request.launch}, {self.launch} is there")
        self.incarnation_seen(request.worker, request.incarnation)
        self._check_current(request.worker, request.incarnation)
        is_first = self.workers.report(request, self._clock())
        if not self.begun:
            if is_first:
                self.pending_reports.take(request)
            self._begin_if_complete()
            return m.Session(self.number)
        if is_first:
            for held in still_there(request):
                self.rollouts.enter_held(request.worker, held.granted)
        for held in request.held:
            if held.end is not None:
                self._finish(held.end)
        self._changed()
        return m.Session(self.number)

    async def begin_run(self, request: m.RunBegin) -> m.Session:
        """Take the checkpoint from which the run continues, and begin a lineage of the ledger after it. A repeated call
        changes nothing.
        """
        async with self._beginning:
            if not self.begun and self.pending_reports.run is None:
                if self._ledger is not None:
                    self._ended = await asyncio.to_thread(self._ledger.begin, request.version, request.checkpoint)
                self.pending_reports.run = request
                self._begin_if_complete()
        return m.Session(self.number)

    def begin(self, run: m.RunBegin) -> None:
        """Begin without a ledger and without workers that hold anything."""
        self.pending_reports.run, self.pending_reports.awaited = run, {}
        self._begin_if_complete()

    def await_workers(self, ready: Mapping[str, int]) -> None:
        """Await the reports of these workers' processes, by incarnation."""
        if not self.begun:
            self.pending_reports.await_workers(ready, self._clock())
            self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        """Rebuild the state once all have reported; then apply the deaths seen meanwhile, and open the gate."""
        pending, run = self.pending_reports, self.pending_reports.run
        if self.begun or run is None or not pending.is_complete:
            return
        served = self.gate.version  # servers may have registered by now
        curriculum = None if self._make_curriculum is None else self._make_curriculum(run.checkpoint.curriculum or ())
        rollouts = RolloutState(
            self.gate.batch_size,
            self.gate.max_staleness,
            self.rollouts.order,
            self._ledger,
            version=run.version,
            checkpoint=run.checkpoint,
            ended=self._ended,
            curriculum=curriculum,
        )
        rollouts.rebuild(run.received, pending.reports)
        self.rollouts = rollouts
        self.gate.advance(served)
        self.begun, self.pending_reports = True, PendingReports()
        self.admission.begin(self.rollouts)
        for ended in pending.ended:
            if not self.workers.is_back(ended):
                self._end(ended)
        self._changed()
        _log.info("the gate is open: %s", self.gate.counts())

    async def _check_trainer(self, request: m.TrainerRequest[Any]) -> None:
        """Return once the state is rebuilt, if the call is meant for this manager."""
        self._check_meant(request.manager)
        await self._until_begun()

    async def _until_begun(self) -> None:
        """Return once the state is rebuilt; refuse the call if that takes longer than `HOLD_S`."""
        deadline = self._clock() + HOLD_S
        while not self.begun:
            if not await self.progress.wait(deadline - self._clock()):
                raise m.NotRebuilt("the manager waits for the MasterWorker and RolloutWorkers to say what they have")

    async def allocate_rollout(self, request: m.AllocateRequest) -> m.AllocateReply:
        """Start rollouts for a prefix of the ids; wait while there is nothing to answer."""
        self._check_meant(request.manager)
        for rollout_id in request.rollouts:
            self.admission.is_gone(rollout_id)  # a refused call changes nothing
        self._note_call(request)
        return await self.admission.answer(request, self._deadline(request.timeout_s))

    async def schedule_request(self, request: m.ScheduleRequest) -> m.ScheduleReply:
        """Place the requests on servers; wait while none can be placed."""
        self._note_call(request)
        worker, deadline = request.worker, self._deadline(request.timeout_s)
        while not self._is_over(request) and self.workers.keep(worker, self._clock()):
            placed = [(each.request_id, self._place(each, worker)) for each in request.requests]
            scheduled = {name: m.Route(server.url, server.version) for name, server in placed if server is not None}
            if scheduled or not request.requests or not await self.routes.changed.wait(deadline - self._clock()):
                return m.ScheduleReply(scheduled)
        return m.ScheduleReply({})

    async def finish_rollout(self, request: m.FinishRequest) -> m.Done:
        """Record ends of rollouts and requests, if no other call carries them."""
        self._note_call(request)
        return m.Done()

    async def received(self, request: m.ReceivedReport) -> m.ReceivedReply:
        """Record the rollouts that the trainer has; return those that do not count, and must not be trained."""
        await self._check_trainer(request)
        refused = []
        for each in request.rollouts:
            self.routes.release_rollout(each.rollout_id)
            ran = self.gate.live.running(each.rollout_id) is not None
            if not self.rollouts.receive(each.rollout_id, each.tokens):
                refused.append(each.rollout_id)
            elif ran:
                self.admission.rollout_ended(each.rollout_id, kept=True)
        self._changed()
        return m.ReceivedReply(refused)

    async def consumed(self, request: m.ConsumedReport) -> m.ConsumedReply:
        """Record the rollouts that a step trained, with its line in the ledger, and those that the trainer dropped.

        Returns:
            The gate's state as of the step's line, if a step was reported; a repeated report gets the same.

        Raises:
            BadRequest: a trained rollout does not count, or the version cannot have been trained: rollouts admitted
                while version v is served suffice for v + η + 1 steps.
        """
        await self._check_trainer(request)
        newest = max(self.gate.version, self.gate.trained_version) + self.gate.max_staleness + 1
        if request.version > newest:
            raise m.BadRequest(f"$.version: {request.version} cannot be trained yet, at most {newest} can")
        trained = request.trained if request.version > self.gate.trained_version else []
        if strays := [each.rollout_id for each in trained if each.rollout_id not in self.gate.live]:
            raise m.BadRequest(f"$.trained: {strays[:3]} do not count, {len(strays)} in all")
        self.rollouts.drop(request.dropped)
        for dropped in request.dropped:
            self.admission.rollout_ended(dropped.rollout_id, kept=False)
        if trained:
            self.rollouts.train(request.version, request.trained)
            self.admission.batch_taken()
            self._last_step = self._reply(self.rollouts.checkpoint())
        self._changed()
        reply = self._last_step if request.trained and self._last_step else self._reply()
        if self._ledger is not None:
            await self._ledger.written()
        return reply

    def _reply(self, checkpoint: m.GateCheckpoint | None = None) -> m.ConsumedReply:
        """Return the gate's state as of now."""
        return m.ConsumedReply(self.gate.counts(), checkpoint, self.admission.idle_s, sorted(self._versions_in_use()))

    async def wait_expiring(self, request: m.WaitExpiringRequest) -> m.WaitExpiringReply:
        """Wait until the step can be taken without making a running rollout expire."""
        await self._until_begun()
        deadline = self._deadline(request.timeout_s)
        while self.gate.is_blocked(request.version):
            if not await self.progress.wait(deadline - self._clock()):
                return m.WaitExpiringReply(self.gate.blocking(request.version))
        return m.WaitExpiringReply([])

    async def lost_servers(self, request: m.LostServersRequest) -> m.LostServersReply:
        """Wait until a server leaves service unexpectedly."""
        self._note_call(request)
        after, deadline = request.after, self._deadline(request.timeout_s)
        while not self._is_over(request) and self.workers.keep(request.worker, self._clock()):
            urls = [] if after < 0 else self.routes.losses.since(after)
            if urls or after < 0 or not await self.routes.losses.changed.wait(deadline - self._clock()):
                return m.LostServersReply(self.routes.losses.seq, urls)
        return m.LostServersReply(self.routes.losses.seq, [])

    async def close_gate(self, request: m.CloseGate) -> m.Done:
        """Start no rollout from now on."""
        await self._check_trainer(request)
        self.gate.close()
        self.admission.tell_of_the_end()
        return m.Done()

    async def end_run(self, request: m.EndReport) -> RolloutCounts:
        """Abandon every live rollout, and write the ledger's last line; return the final counters."""
        await self._check_trainer(request)
        counts = self.rollouts.end(request.version)
        self.admission.tell_of_the_end()
        self.progress.notify()
        if self._ledger is not None:
            await self._ledger.written()
        return counts

    def gate_state(self) -> m.GateState:
        """Return the gate's state, and the seconds in which it let no rollout run."""
        gate = self.gate
        return m.GateState(
            counts=gate.counts(),
            version=gate.version,
            trained_version=gate.trained_version,
            limit=gate.limit,
            closed=gate.closed,
            idle_s=self.admission.idle_s,
            used_up=self.rollouts.used_up,
        )

    def routes_changed(self, served_version: int | None) -> None:
        """Record that the router's servers changed.

        Args:
            served_version: least version among the servers that take requests; None if none does.
        """
        if self.gate.advance(served_version or 0):
            self.admission.admit()
        self.routes.changed.notify()

    def expire_workers(self) -> list[str]:
        """Drop the rollouts of workers whose lease has run out; return their names."""
        late = self.workers.expire(self._clock())
        for worker in late:
            self.worker_died(worker)
        return late

    def incarnation_seen(self, worker: str, incarnation: int, *, killed: bool = False) -> bool:
        """Record that this incarnation of the worker exists; return True if it is new, which ends the ones before.

        Args:
            killed: the launcher reports that the one before was killed from outside.
        """
        if not self.workers.see(worker, incarnation):
            return False
        self._end(EndedProcess(worker, incarnation, killed))
        return True

    def worker_died(self, worker: str) -> None:
        """Drop the running rollouts of a worker whose process is gone; their prompts wait for any worker."""
        self._end(EndedProcess(worker))

    def _end(self, ended: EndedProcess) -> None:
        """Record that a worker's process is over. If the state is not rebuilt yet, this is applied later."""
        worker = ended.worker
        self.workers.end(worker)
        self.routes.release_worker(worker)
        if not self.begun:
            self.pending_reports.ended.append(ended)
            return
        self.admission.worker_left(worker)
        if ended.replaced_by is None or self._online:
            lost = self.rollouts.died(worker)
        else:
            lost = self.rollouts.replaced(worker, killed=ended.killed)
        for rollout_id in lost:
            self.routes.release_rollout(rollout_id)
            self.admission.rollout_ended(rollout_id, kept=False)
        self._changed()

    def _changed(self) -> None:
        """Start rollouts if there is room, and have waiting calls check again."""
        self.admission.admit()
        self.progress.notify()

    def _place(self, request: m.RouteRequest, worker: str) -> ServerView | None:
        """Return a server for the request; None if there is none now, or if its rollout has ended."""
        admitted_at: int | None = None
        if request.rollout_id is not None:
            known = self.gate if self.begun else self.pending_reports
            if known.has_ended(request.rollout_id):
                return None
            admitted_at = known.admitted_at(request.rollout_id)
        return self.routes.place(request, Caller(worker, self.workers.of(worker).host), admitted_at or 0)

    def _note_call(self, request: m.WorkerRequest[Any]) -> None:
        """Renew the caller's lease, and record the ends that its call reports.

        Raises:
            SessionRequired: the caller has no session with this manager.
            BadRequest: a later process has replaced the worker; the reported ends still count.
        """
        self._check_meant(request.manager)
        if self.begun:
            self.incarnation_seen(request.worker, request.incarnation)
        if not self._is_over(request):
            self.workers.renew(request.worker, self._clock())
        for request_id in request.released:
            self.routes.release(request_id)
        for finished in request.finished:
            self._finish(finished)
        if request.finished:
            self.admission.admit()
        if request.released or request.finished:
            self.progress.notify()
        self._check_current(request.worker, request.incarnation)

    def _check_meant(self, manager: int) -> None:
        """Refuse a call that is meant for another manager."""
        if manager != self.number:
            raise m.SessionRequired(f"$.manager: {manager} was the manager before, {self.number} is there")

    def _check_current(self, worker: str, incarnation: int) -> None:
        """Refuse a call of a process that a later one has replaced."""
        if incarnation < (newest := self.workers.of(worker).incarnation):
            raise m.BadRequest(f"$.incarnation: {incarnation} of {worker} is over, {newest} is there")

    def _is_over(self, request: m.WorkerRequest[Any]) -> bool:
        """True if another process has replaced the worker that sent the request."""
        return request.incarnation < self.workers.of(request.worker).incarnation

    def _finish(self, finished: m.FinishedRollout) -> None:
        """Record the end of a rollout: a rank has it, or it is dropped."""
        self.routes.release_rollout(finished.rollout_id)
        if not self.begun:
            self.pending_reports.finish(finished)
            return
        self.rollouts.finish(finished)
        if not finished.accepted:
            self.admission.rollout_ended(finished.rollout_id, kept=False)

    def _deadline(self, hold_s: float) -> float:
        return self._clock() + min(hold_s, HOLD_S)


class ManagerHttp(HttpServer):
    """The server."""

    def __init__(
        self, methods: Mapping[str, m.Method], *, security: HttpSecurity | None, registry: CollectorRegistry
    ) -> None:
        async def health(request: web.BaseRequest, body: bytes) -> web.Response:
            return json_response({"status": "ok"})

        async def metrics(request: web.BaseRequest, body: bytes) -> web.Response:
            return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        routes = {
            path: HttpRoute(answering(method), max_bytes=MAX_RUN_BYTES if method[0] is m.RunBegin else MAX_BODY_BYTES)
            for path, method in methods.items()
        }
        routes |= {"/health": HttpRoute(health, open=True), "/metrics": HttpRoute(metrics, open=True)}
        token, tls = (None, None) if security is None else (security.token, security.server_context())
        super().__init__(routes, token=token, tls=tls, registry=registry)


def answering(method: m.Method) -> Handler:
    """Build the HTTP handler of the method. A body that is not a valid request is answered with `Refused`."""
    kind, handler = method
    decoder: msgspec.json.Decoder[Any] = json_decoder(kind)

    async def answer(request: web.BaseRequest, body: bytes) -> web.Response:
        try:
            return json_response(await handler(decoder.decode(body or b"{}")))
        except msgspec.ValidationError as error:
            # "Expected `int`, got `str` - at `$.order`"
            what, _, path = str(error).replace("`", "").partition(" - at ")
            raise _malformed(f"{path or '$'}: {what[:1].lower()}{what[1:]}") from error
        except m.SessionRequired as error:
            raise Refused(409, {"error": str(error)}, "not_introduced") from error
        except m.NotRebuilt as error:
            raise Refused(503, {"error": str(error)}, "not_rebuilt") from error
        except (m.BadRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(str(error)) from error

    return answer


def _malformed(message: str) -> Refused:
    return Refused(400, {"error": message}, "malformed")
