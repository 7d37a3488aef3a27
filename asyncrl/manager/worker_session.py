"""Calls to the current GserverManager, and a worker's session with each new manager.

Every call is idempotent, since the caller chooses the ids. So a call whose reply was lost is repeated with back-off for
up to `retry_s`, each time at the manager's latest address in name resolution. A worker first opens a session with each
manager by reporting what it holds (`asyncrl.manager.rollouts.rebuild`). Each of its calls also reports the rollouts and
requests that ended since the last call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import structs

from asyncrl.comm.http.calls import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.comm.waits.limits import CALL_S
from asyncrl.manager import messages as m

NOT_INTRODUCED = 409
"""Status of a call that was meant for another manager."""
NOT_REBUILT = 503
"""Status of a call to a manager that waits for workers to report, `SystemConfig.silence_s` at most."""
_BACKOFF = Backoff(0.05, 2.0)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Request = TypeVar("_Request", bound=m.WorkerRequest)


class ManagerGone(RuntimeError):
    """The GserverManager did not answer within the time for which a call is repeated."""


class ManagerConnection:
    """Repeats each call at the manager's current address until the manager answers it.

    Args:
        url: URL of the manager.
        retry_s: seconds for which a call is repeated while the manager does not answer.
        find: returns the manager's current URL. Called after a failed call, since a new process may have replaced the
            manager.

    Attributes:
        http: the HTTP connections.
    """

    def __init__(self, http: JsonHttp, url: str, *, retry_s: float, find: Callable[[], str] | None) -> None:
        self.http = http
        self._url, self._retry_s, self._find = url.rstrip("/"), retry_s, find

    async def call(self, path: str, request: m.Message | None, reply: type[_T], *, hold_s: float = 0.0) -> _T:
        """POST `request` (GET if it is None), and repeat the call while the manager does not answer.

        Args:
            hold_s: time for which the manager may hold the call.

        Raises:
            HttpRefused: the manager refused the call.
            ManagerGone: the manager did not answer.
        """
        method, limit_s = "GET" if request is None else "POST", hold_s + CALL_S
        deadline = asyncio.get_running_loop().time() + self._retry_s + hold_s
        failures = 0
        while True:
            try:
                return await self.http.call(method, self._url + path, request, timeout_s=limit_s, reply=reply)
            except HttpError as error:
                if isinstance(error, HttpRefused) and error.status < 500:
                    raise
                last = error
            if isinstance(last, HttpRefused) and last.status == NOT_REBUILT:  # lasts for one lease at most
                deadline = asyncio.get_running_loop().time() + self._retry_s + hold_s
            failures += 1
            delay_s = _BACKOFF.delay(failures)
            if asyncio.get_running_loop().time() + delay_s > deadline:
                raise ManagerGone(f"GserverManager {path}: {last}; given up after {self._retry_s:g} s") from last
            await asyncio.sleep(delay_s)
            await self._look_up()

    async def close(self) -> None:
        """Close the connections."""
        await self.http.close()

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


class HeldRollouts:
    """Rollouts that this worker holds, for its report to a new manager. Pure state."""

    def __init__(self) -> None:
        self._granted: dict[str, m.GrantedRollout] = {}
        self._ends: dict[str, m.FinishedRollout] = {}

    def granted(self, rollouts: Iterable[m.GrantedRollout]) -> None:
        """Add running rollouts."""
        self._granted |= {each.rollout_id: each for each in rollouts}

    def ended(self, rollouts: Iterable[m.FinishedRollout]) -> None:
        """Add ends that no manager has confirmed yet."""
        self._ends |= {each.rollout_id: each for each in rollouts}

    def confirmed(self, rollouts: Iterable[m.FinishedRollout]) -> None:
        """Remove rollouts whose ends the manager has received."""
        for each in rollouts:
            self._granted.pop(each.rollout_id, None)
            self._ends.pop(each.rollout_id, None)

    def all(self) -> list[m.HeldRollout]:
        """Return all rollouts, with their ends."""
        return [m.HeldRollout(granted, self._ends.get(key)) for key, granted in self._granted.items()]


@dataclass(slots=True)
class _Ended:
    """Ends that are not reported yet: ids of requests, and rollouts."""

    released: list[str] = field(default_factory=list)
    finished: list[m.FinishedRollout] = field(default_factory=list)


class WorkerSession:
    """Makes a worker's calls to the manager, and reports the ends of its rollouts and requests with each call.

    No end is lost: it is reported again until the manager of the present session has confirmed it, or has received it
    as held.

    Args:
        worker: `<kind>/<index>` of the caller.
        incarnation: number of the caller's process, see `WorkerRequest`.
        launch: launch that the caller belongs to.
        host: address of its host.
    """

    def __init__(self, connection: ManagerConnection, worker: str, incarnation: int, launch: str, host: str) -> None:
        self._connection = connection
        self.worker, self._incarnation, self._launch, self._host = worker, incarnation, launch, host
        self._unreported = _Ended()
        self._held = HeldRollouts()
        self._manager: int | None = None  # number of the manager that the session is with
        self._opening = asyncio.Lock()

    @property
    def has_unreported(self) -> bool:
        """True if the next call has ends to report."""
        return bool(self._unreported.released or self._unreported.finished)

    def granted(self, rollouts: Iterable[m.GrantedRollout]) -> None:
        """Record that the worker holds these rollouts."""
        self._held.granted(rollouts)

    def finish(self, rollouts: Sequence[m.FinishedRollout]) -> None:
        """Report with the next call that `rollouts` and their requests ended."""
        self._unreported.finished += rollouts
        self._held.ended(rollouts)

    def release(self, request_id: str) -> None:
        """Report with the next call that the request ended."""
        self._unreported.released.append(request_id)

    async def call(self, path: str, request: _Request, reply: type[_T], *, hold_s: float = 0.0) -> _T:
        """Make the worker's call, and report its unreported ends with it.

        A reply counts only in the session of its request. The manager that sent it may have died since, and its
        successor does not know the reply.
        """
        while True:
            manager = await self._open()
            ended, self._unreported = self._unreported, _Ended()
            request = structs.replace(
                request,
                incarnation=self._incarnation,
                manager=manager,
                released=ended.released,
                finished=ended.finished,
            )
            try:
                answer = await self._connection.call(path, request, reply, hold_s=hold_s)
            except BaseException as error:  # the ends may have arrived; reporting them again is harmless
                self._report_again(ended)
                if not isinstance(error, HttpRefused) or error.status != NOT_INTRODUCED:
                    raise
                if self._manager == manager:
                    self._manager = None
                continue
            if self._manager == manager:
                self._held.confirmed(ended.finished)
                return answer
            self._report_again(ended)

    def _report_again(self, ended: _Ended) -> None:
        since = self._unreported
        self._unreported = _Ended(ended.released + since.released, ended.finished + since.finished)

    async def _open(self) -> int:
        """Return the number of the manager that the session is with; open a session first if there is none."""
        async with self._opening:
            if self._manager is None:
                report = m.HeldReport(self.worker, self._incarnation, self._held.all(), self._launch, self._host)
                self._manager = (await self._connection.call("/open_session", report, m.Session)).manager
            return self._manager
