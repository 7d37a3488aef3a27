"""Call the GserverManager over HTTP, as a RolloutWorker or the master.

Failed calls are repeated. Each call carries the worker's unreported ends of rollouts and requests
(`asyncrl.manager.worker_session`). This module decides when the ends are sent.

On busy cores, the manager's cost is proportional to the number of calls. So requests to schedule from one turn of the
event loop share one call. Ends of rollouts and requests travel with the worker's next call, of any kind. Without a next
call they are sent after `GATHER_S`, or after `BURST_S` if another rollout may start in place of a dropped one. The
report is immediate if a curriculum needs the measured success.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from asyncrl.comm.ended_rollouts.ledger_lines import RolloutCounts
from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.comm.waits.limits import BURST_S, CLOSE_S, GATHER_S, PAUSE_S
from asyncrl.manager import messages as m
from asyncrl.manager.worker_session import ManagerConnection, ManagerGone, WorkerSession

__all__ = ["GateStatus", "ManagerClient", "ManagerGone"]

ROUTE_LIFE_S = 0.2
"""For which the server that came with an admission may be used without a new request. An agent that
begins at once needs less.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GateStatus:
    """State of the manager.

    Attributes:
        idle_s: seconds so far in which the gate let no rollout run.
        versions_in_use: versions that servers serve or load.
        dropped: number of rollouts dropped so far, by reason.
        rebuilt: False while the numbers are not known (`StatusReply`).
        running: number of rollouts under way on living workers.
        served: oldest version that servers serve, as the gate counts it; None if unknown.
        loading: True if a server loads weights, in its first attempt.
        able: True if a server is not in quarantine.
        used_up: see `GateState`.
    """

    idle_s: float = 0.0
    versions_in_use: frozenset[int] = frozenset()
    dropped: Mapping[str, int] = field(default_factory=dict)
    rebuilt: bool = True
    running: int = 0
    served: int | None = None
    loading: bool = False
    able: bool = True
    used_up: bool = False


class ManagerClient:
    """Calls the GserverManager. Use it from one event loop.

    Args:
        url: URL of the manager.
        worker: `<kind>/<index>` of the caller.
        security: token and certificate; None if the run has no secret.
        incarnation: number of the caller's process, see `WorkerRequest`.
        retry_s: seconds for which a call is repeated while the manager does not answer.
        find: returns the manager's current URL. Called after a failed call, since a new process may have replaced the
            manager.
        launch: launch that the caller belongs to.
        host: address of the caller's host.
    """

    def __init__(
        self,
        url: str,
        worker: str,
        security: HttpSecurity | None,
        *,
        incarnation: int = 0,
        retry_s: float = PAUSE_S,
        find: Callable[[], str] | None = None,
        launch: str = "",
        host: str = "",
    ) -> None:
        self._connection = ManagerConnection(JsonHttp(security), url, retry_s=retry_s, find=find)
        self._session = WorkerSession(self._connection, worker, incarnation, launch, host)
        self._manager = 0
        self._to_schedule: list[tuple[m.RouteRequest, asyncio.Future[m.Route | None]]] = []
        self._flush_timer: asyncio.Handle | None = None
        self._flush_at = 0.0
        self._calls: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> m.AllocateReply:
        """Request a prompt for each id in `rollouts`. The manager may hold the call for `timeout_s`.

        The caller asks again for ids that are not granted, unless they are `gone`.

        Raises:
            ManagerGone: the manager did not answer.
        """
        request = m.AllocateRequest(worker=self._session.worker, rollouts=list(rollouts), timeout_s=timeout_s)
        reply = await self._session.call("/allocate_rollout", request, m.AllocateReply, hold_s=timeout_s)
        self._session.granted(reply.granted)
        expires_at = asyncio.get_running_loop().time() + ROUTE_LIFE_S
        granted = [
            grant
            if grant.route is None
            else structs.replace(grant, route=structs.replace(grant.route, expires_at=expires_at))
            for grant in reply.granted
        ]
        return structs.replace(reply, granted=granted)

    def finish(self, rollouts: Sequence[m.FinishedRollout]) -> None:
        """Report the ends of `rollouts` with the next call. Call this after the trainer's acknowledgement."""
        self._session.finish(rollouts)
        self._flush_within(min(map(_waits_s, rollouts), default=GATHER_S))

    async def schedule(self, request: m.RouteRequest, timeout_s: float) -> m.Route | None:
        """Return a server for `request`; None if none took it within `timeout_s`. A repeated id moves the request."""
        answer: asyncio.Future[m.Route | None] = asyncio.get_running_loop().create_future()
        if not self._to_schedule:
            self._spawn(self._flush_schedules(timeout_s), self._calls)
        self._to_schedule.append((request, answer))
        return await answer

    def release(self, request_id: str) -> None:
        """Report the end of the request with the next call. May be repeated."""
        self._session.release(request_id)
        self._flush_within(GATHER_S)

    async def flush(self) -> None:
        """Report all unreported ends now.

        Raises:
            ManagerGone: the manager did not answer.
        """
        if self._session.has_unreported:
            await self._session.call("/finish_rollout", m.FinishRequest(worker=self._session.worker), m.Done)

    async def lost_servers(self, after: int, timeout_s: float) -> m.LostServersReply:
        """Wait up to `timeout_s` for a server to leave service unexpectedly. The call also renews the worker's lease.

        Args:
            after: number of the last loss that is known; -1 asks for the present number only, without waiting.

        Returns:
            The URLs of the servers lost since, and the number of the last loss.
        """
        request = m.LostServersRequest(worker=self._session.worker, after=after, timeout_s=timeout_s)
        return await self._session.call("/lost_servers", request, m.LostServersReply, hold_s=timeout_s)

    async def begin_run(self, begin: m.RunBegin) -> None:
        """Bring the checkpoint from which the run continues, before the calls that follow here."""
        self._manager = (await self._connection.call("/begin_run", begin, m.Session)).manager

    async def received(self, rollouts: Sequence[m.ReceivedRollout]) -> list[str]:
        """Report what the trainer has received; return the ids of those that do not count, and must not be trained."""
        report = m.ReceivedReport(list(rollouts), manager=self._manager)
        return (await self._connection.call("/received", report, m.ReceivedReply)).refused

    async def consumed(
        self, version: int, trained: Sequence[m.TrainedRollout] = (), dropped: Sequence[m.DroppedRollout] = ()
    ) -> m.ConsumedReply:
        """Report what the trainer consumed.

        Args:
            version: version of the policy after it.
            trained: rollouts that the step to this version consumed.
            dropped: rollouts that were received and will not be trained.
        """
        report = m.ConsumedReport(version, list(trained), list(dropped), manager=self._manager)
        return await self._connection.call("/consumed", report, m.ConsumedReply)

    async def wait_expiring(self, version: int, timeout_s: float) -> list[str]:
        """Wait until the step at policy version `version` can be taken without making a running rollout expire.

        Returns:
            The rollouts that are still awaited after `timeout_s`; empty if the step can be taken.
        """
        request = m.WaitExpiringRequest(version, timeout_s)
        return (await self._connection.call("/wait_expiring", request, m.WaitExpiringReply, hold_s=timeout_s)).running

    async def wait_resting(self, turn: int, timeout_s: float) -> m.WaitRestingReply:
        """Wait until all guests have released their memory, in the trainer's turn of this number.

        Returns:
            The servers that are still awaited after `timeout_s`; empty if the trainer has the devices.
        """
        request = m.WaitRestingRequest(turn, timeout_s)
        return await self._connection.call("/wait_resting", request, m.WaitRestingReply, hold_s=timeout_s)

    async def close_gate(self) -> None:
        """Close the gate: no rollout starts from now on."""
        await self._connection.call("/close_gate", m.TrainerRequest(manager=self._manager), m.Done)

    async def end_run(self, version: int) -> RolloutCounts:
        """Abandon all rollouts that run or wait to be trained; return the final counters."""
        return await self._connection.call("/end_run", m.EndReport(version, manager=self._manager), RolloutCounts)

    async def status(self) -> GateStatus:
        """Return the manager's state."""
        reply = await self._connection.call("/status", None, m.StatusReply)
        servers = (*reply.servers, *reply.opponents)
        in_use = {version for server in servers for version in (server.version, server.goal)}
        gate, known = reply.gate, frozenset(version for version in in_use if version is not None)
        loading = any(server.state == m.ServerState.UPDATING and not server.failures for server in servers)
        able = any(server.state != m.ServerState.QUARANTINED for server in reply.servers)
        moves = (gate.counts.running, gate.version, loading, able, gate.used_up)
        return GateStatus(gate.idle_s, known, gate.counts.dropped, reply.rebuilt, *moves)

    async def describe(self) -> str:
        """Return the manager's state as one readable line."""
        reply = await self._connection.call("/status", None, m.StatusReply)
        gate, counts = reply.gate, reply.gate.counts
        servers = (*reply.servers, *reply.opponents)
        shown = ", ".join(f"{s.policy}{s.index} {s.state} v{s.version} ({s.sequences} running)" for s in servers)
        if not reply.rebuilt:
            return f"the gate is shut until the MasterWorker and all RolloutWorkers report; servers: {shown or 'none'}"
        return (
            f"gate: trained {counts.trained} + finished {counts.finished_untrained} + running {counts.running} of "
            f"{gate.limit} allowed at served version {gate.version}; servers: {shown or 'none'}"
        )

    async def close(self) -> None:
        """Report ends that are not reported yet, then close the connections."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_now()
        if self._flushes:
            await asyncio.wait(self._flushes, timeout=CLOSE_S)
        for flush in self._flushes:
            flush.cancel()
        await asyncio.gather(*self._flushes, return_exceptions=True)
        await self._connection.close()

    def _spawn(self, call: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Start `call` in the event loop's next turn, so that it includes all that the current turn adds."""
        task = asyncio.get_running_loop().create_task(call)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _flush_schedules(self, timeout_s: float) -> None:
        batch, self._to_schedule = self._to_schedule, []
        answers = {request.request_id: answer for request, answer in batch}
        requests = [request for request, _ in batch]
        request = m.ScheduleRequest(worker=self._session.worker, requests=requests, timeout_s=timeout_s)
        try:
            reply = await self._session.call("/schedule_request", request, m.ScheduleReply, hold_s=timeout_s)
            for placed in reply.scheduled:
                if (answer := answers.pop(placed.request_id, None)) is None:
                    _log.warning("the GserverManager placed request %s, which is not waiting here", placed.request_id)
                elif answer.done():  # cancelled, and released before the server was placed
                    self.release(placed.request_id)
                else:
                    answer.set_result(m.Route(placed.url, placed.version))
            for answer in answers.values():
                if not answer.done():
                    answer.set_result(None)
        except asyncio.CancelledError:
            for answer in answers.values():
                answer.cancel()
            raise
        except Exception as error:  # whatever it is, it is the callers'
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(error)

    def _flush_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds
        if self._flush_timer is not None:
            if self._flush_at <= at:
                return
            self._flush_timer.cancel()
        self._flush_at, self._flush_timer = at, loop.call_at(at, self._flush_now)

    def _flush_now(self) -> None:
        """Report all unreported ends in a separate call, since no other call was made."""
        self._flush_timer = None
        if self._session.has_unreported:
            self._spawn(self._flush_in_background(), self._flushes)

    async def _flush_in_background(self) -> None:
        try:
            await self.flush()
        except (HttpError, ManagerGone) as error:  # the ends stay for the next call, whose caller receives its error
            _log.warning("ends of rollouts are not reported to the GserverManager yet: %s", error)


def _waits_s(ended: m.FinishedRollout) -> float:
    """Return the seconds that the report of this end may wait for a call to travel with."""
    if ended.success is not None:  # a curriculum uses it for the next allocation
        return 0.0
    return GATHER_S if ended.accepted else BURST_S
