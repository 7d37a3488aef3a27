"""Call the GserverManager over HTTP, as a RolloutWorker or the master.

Every call is idempotent, since the caller chooses the ids. So a call whose reply was lost is repeated with back-off for
up to `retry_s`, each time at the manager's latest address in name resolution. A worker first opens a session with each
manager by reporting what it holds (`asyncrl.manager.rollouts.workers`).

On busy cores, the manager's cost is proportional to the number of calls. So requests to schedule from one turn of the
event loop share one call. Ends of rollouts and requests travel with the worker's next call, of any kind. Without a next
call they are sent after `GATHER_S`, or after `BURST_S` if another rollout may start in place of a dropped one. The
report is immediate if a curriculum needs the measured success.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from msgspec import structs

from asyncrl.comm.http_client import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.waits import BURST_S, CALL_S, CLOSE_S, GATHER_S, PAUSE_S, Backoff
from asyncrl.manager import messages as m

ROUTE_LIFE_S = 0.2
"""For which the server that came with an admission may be used without a new request. An agent that
begins at once needs less.
"""
SESSION_REQUIRED = 409
"""Status of a call that was meant for another manager."""
NOT_REBUILT = 503
"""Status of a call to a manager that waits for workers to report, `SystemConfig.silence_s` at most."""
_BACKOFF = Backoff(0.05, 2.0)

_log = logging.getLogger(__name__)


class ManagerGone(RuntimeError):
    """The GserverManager did not answer within the time for which a call is repeated."""


class ManagerClient:
    """Calls the GserverManager. Use it from one event loop.

    Args:
        security: token and certificate; None if the run has no secret.
        incarnation: number of the caller's process, see `WorkerRequest`.
        retry_s: seconds for which a call is repeated while the manager does not answer.
        find: returns the manager's current URL. Called after a failed call, since a new process may have replaced the
            manager.
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
        self._http, self._url, self._retry_s, self._find = JsonHttp(security), url.rstrip("/"), retry_s, find
        self._worker, self._incarnation, self._launch, self._host = worker, incarnation, launch, host
        self._manager: int | None = None  # number of the manager that the session is with
        self._opening = asyncio.Lock()
        self._held = HeldRollouts()  # for the report to a new manager
        self._released: list[str] = []  # this and the following are not reported yet
        self._finished: list[m.FinishedRollout] = []
        self._to_schedule: list[tuple[m.RouteRequest, asyncio.Future[m.Route | None]]] = []
        self._flush_timer: asyncio.Handle | None = None
        self._flush_at = 0.0
        self._calls: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()

    async def allocate(self, rollouts: Sequence[str], *, timeout_s: float) -> m.AllocateReply:
        """Request a prompt for each id in `rollouts`. The manager may hold the call for `timeout_s`.

        The caller asks again for ids that are not granted, unless they are `gone`.
        """
        request = m.AllocateRequest(worker=self._worker, rollouts=list(rollouts), timeout_s=timeout_s)
        reply = await self._call(request)
        self._held.granted(reply.granted)
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
        self._finished += rollouts
        self._held.ended(rollouts)
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
        self._released.append(request_id)
        self._flush_within(GATHER_S)

    async def flush(self) -> None:
        """Report all unreported ends now."""
        if self._released or self._finished:
            await self._call(m.FinishRequest(worker=self._worker))

    async def lost_servers(self, after: int, timeout_s: float) -> m.LostServersReply:
        """Wait up to `timeout_s` for a server to leave service unexpectedly. The call also renews the worker's lease.

        Args:
            after: number of the last loss that is known; -1 asks for the present number only, without waiting.

        Returns:
            The URLs of the servers lost since, and the number of the last loss.
        """
        return await self._call(m.LostServersRequest(worker=self._worker, after=after, timeout_s=timeout_s))

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
        await self._http.close()

    async def call(self, request: m.Request[m.R]) -> m.R:
        """Make a call that reports nothing of a worker's, and repeat it while the manager does not answer. Calls of a
        trainer are meant for the manager that answered the last `RunBegin`.

        Raises:
            HttpRefused: the manager refused the call.
            ManagerGone: the manager did not answer.
        """
        if isinstance(request, m.TrainerRequest):
            request = structs.replace(request, manager=self._manager or 0)
        hold_s: float = getattr(request, "timeout_s", 0.0)
        deadline = asyncio.get_running_loop().time() + self._retry_s + hold_s
        failures = 0
        while True:
            try:
                url, limit_s = self._url + request.path, hold_s + CALL_S
                answer: m.R = await self._http.call("POST", url, request, timeout_s=limit_s, reply=request.reply)
                if isinstance(answer, m.Session):
                    self._manager = answer.manager
                return answer
            except HttpError as error:
                if isinstance(error, HttpRefused) and error.status < 500:
                    raise
                last = error
            if isinstance(last, HttpRefused) and last.status == NOT_REBUILT:  # lasts for one lease at most
                deadline = asyncio.get_running_loop().time() + self._retry_s + hold_s
            failures += 1
            delay_s = _BACKOFF.delay(failures)
            if asyncio.get_running_loop().time() + delay_s > deadline:
                raise ManagerGone(
                    f"GserverManager {request.path}: {last}; given up after {self._retry_s:g} s"
                ) from last
            await asyncio.sleep(delay_s)
            await self._look_up()

    async def _look_up(self) -> None:
        """Look up the manager's address, which a restart changes."""
        if self._find is None:
            return
        try:
            url = (await asyncio.to_thread(self._find)).rstrip("/")
        except NameResolveError as error:  # its lease has expired, or name resolution does not answer
            _log.info("the GserverManager is not registered now: %s", error)
            return
        if url != self._url:
            _log.warning("the GserverManager moved from %s to %s", self._url, url)
            self._url = url

    async def _call(self, request: m.WorkerRequest[m.R]) -> m.R:
        """Make the worker's call, and report its unreported ends with it.

        No end is lost: it is reported again until the manager of the present session has confirmed it, or has received
        it as held. A reply counts only in the session of its request. The manager that sent it may have died since, and
        its successor does not know the reply.
        """
        while True:
            manager = await self._open_session()
            released, self._released = self._released, []
            finished, self._finished = self._finished, []
            request = structs.replace(
                request, incarnation=self._incarnation, manager=manager, released=released, finished=finished
            )
            try:
                answer = await self.call(request)
            except BaseException as error:  # the ends may have arrived; reporting them again is harmless
                self._report_again(released, finished)
                if not isinstance(error, HttpRefused) or error.status != SESSION_REQUIRED:
                    raise
                if self._manager == manager:
                    self._manager = None
                continue
            if self._manager == manager:
                self._held.confirmed(finished)
                return answer
            self._report_again(released, finished)

    def _report_again(self, released: list[str], finished: list[m.FinishedRollout]) -> None:
        self._released, self._finished = released + self._released, finished + self._finished

    async def _open_session(self) -> int:
        """Return the number of the manager that the session is with; open a session first if there is none."""
        async with self._opening:
            if self._manager is None:
                held = self._held.all()
                await self.call(m.HeldReport(self._worker, self._incarnation, held, self._launch, self._host))
            assert self._manager is not None, "set by the reply"
            return self._manager

    def _spawn(self, call: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Start `call` in the event loop's next turn, so that it includes all that the current turn adds."""
        task = asyncio.get_running_loop().create_task(call)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _flush_schedules(self, timeout_s: float) -> None:
        batch, self._to_schedule = self._to_schedule, []
        answers = {request.request_id: answer for request, answer in batch}
        requests = [request for request, _ in batch]
        request = m.ScheduleRequest(worker=self._worker, requests=requests, timeout_s=timeout_s)
        try:
            reply = await self._call(request)
            for request_id, route in reply.scheduled.items():
                if (answer := answers.pop(request_id, None)) is None:
                    _log.warning("the GserverManager placed request %s, which is not waiting here", request_id)
                elif answer.done():  # cancelled, and released before the server was placed
                    self.release(request_id)
                else:
                    answer.set_result(route)
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
        if self._released or self._finished:
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


class HeldRollouts:
    """Rollouts that a worker holds, for its report to a new manager. Pure state."""

    def __init__(self) -> None:
        self._held: dict[str, m.HeldRollout] = {}

    def granted(self, rollouts: Iterable[m.GrantedRollout]) -> None:
        """Add running rollouts."""
        for each in rollouts:
            self._held.setdefault(each.rollout_id, m.HeldRollout(each))

    def ended(self, rollouts: Iterable[m.FinishedRollout]) -> None:
        """Add ends that no manager has confirmed yet."""
        for each in rollouts:
            if (held := self._held.get(each.rollout_id)) is not None:
                self._held[each.rollout_id] = m.HeldRollout(held.granted, each)

    def confirmed(self, rollouts: Iterable[m.FinishedRollout]) -> None:
        """Remove rollouts whose ends the manager has received."""
        for each in rollouts:
            self._held.pop(each.rollout_id, None)

    def all(self) -> list[m.HeldRollout]:
        """Return all rollouts, with their ends."""
        return list(self._held.values())
