"""Calls to generation servers that end early: the server left service, or it is silent.

A call may take any time while its server computes: its figures (`/metrics`) then change from look to look. If they do
not change for half of the time limit, or the server has none, the call's requests are aborted: a live server returns
what it has generated. One that is silent in the other half too has failed. The manager reports servers that
left service; calls to them end at once.

A call that is aborted loses its place in the server's batch to those that wait there. So while the server computes it
is left alone: of more requests than fit, none would be complete before nearly all are.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from asyncrl.comm.http.calls import HttpError, HttpTimeout
from asyncrl.comm.waits.backoff import Backoff
from asyncrl.comm.waits.limits import ANSWER_S, CLOSE_S, HOLD_S
from asyncrl.inference.client import GenerationServerClient
from asyncrl.manager.client import ManagerClient, ManagerGone

_BACKOFF = Backoff(0.1, 5.0)
_ABORTS = 4
"""Aborts of a call to a silent server: one that was just paused may forget an abort."""
_LONGEST = 30
"""Time limits after which a call is aborted although its server computes: it may have forgotten the request."""
_COMPUTES = ("generated_total", "prefilled_total", "busy_s", "tokens_per_s", "kv_share", "running")
"""Figures of a server that change as it computes, and not as requests arrive."""

_ABORTS_AT_ONCE = 8
"""Concurrent aborts at one server. When an evaluation is cut short, hundreds of calls are cancelled at once. A
connection for each abort would take longer than this process has to stop."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ServerLost(HttpError):
    """The manager reported that the server left service, or the server ended a request to score without scores."""


class ServerCalls:
    """Calls in flight, by server. Use it from one event loop, between `start` and `close`.

    Args:
        manager: reports servers that left service.
        timeout_s: longest silence of a server in seconds.
    """

    def __init__(self, manager: ManagerClient, timeout_s: float) -> None:
        self._manager, self._timeout_s = manager, timeout_s
        self._calls_to: dict[str, set[asyncio.Task[Any]]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Places for aborts, by server."""
        self._watcher: asyncio.Task[None] | None = None
        self._signs: dict[str, tuple[float, asyncio.Task[list[float | None]]]] = {}
        """When each server was last looked at, and what was or will be seen."""

    def start(self) -> None:
        """Follow the manager's reports of lost servers."""
        self._watcher = asyncio.create_task(self._watch_losses())

    async def close(self) -> None:
        """Stop following the reports, and finish the pending aborts."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)

    async def run(self, server: GenerationServerClient, rids: Sequence[str], answers: Coroutine[Any, Any, _T]) -> _T:
        """Await `answers` of `server`. Its requests `rids` are aborted if the server is silent or this is cancelled.

        Raises:
            ServerLost: the manager reports that the server left service.
            HttpTimeout: the server was silent for the time limit.
            HttpError: the call failed.
        """
        call = asyncio.create_task(answers)
        calls = self._calls_to.setdefault(server.url, set())
        calls.add(call)
        try:
            now, half_s = asyncio.get_running_loop().time, self._timeout_s / 2
            begun = heard_at = now()
            asked_at = before = None
            while True:
                await asyncio.wait({call}, timeout=half_s / (2 if asked_at is None else _ABORTS))
                if call.done():
                    return call.result()
                signs = await self._signs_of(server, half_s / 2)
                if None not in (signs, before) and signs != before and now() - begun < _LONGEST * self._timeout_s:
                    heard_at, asked_at = now(), None
                before = signs or before
                if now() - heard_at < half_s:
                    continue
                asked_at = asked_at or now()
                self._in_background(self._abort(server, rids, half_s))
                if now() - asked_at >= half_s:
                    call.cancel()
                    raise HttpTimeout(f"{server.url} did not answer, and computed nothing, for {self._timeout_s:g} s")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if call.cancelled() and task is not None and not task.cancelling():  # by `_watch_losses`
                raise ServerLost(f"{server.url} left service") from None
            call.cancel()
            self._in_background(self._abort(server, rids))
            raise
        finally:
            calls.discard(call)
            if not calls:
                self._calls_to.pop(server.url, None)

    async def _signs_of(self, server: GenerationServerClient, every_s: float) -> list[float | None] | None:
        """Return figures that change while `server` computes, of at most `every_s` ago; None if it tells none."""

        async def look() -> list[float | None]:
            figures = await server.figures(timeout_s=ANSWER_S)
            return [figures.get(name) for name in _COMPUTES]

        now = asyncio.get_running_loop().time()
        at, seen = self._signs.get(server.url, (-math.inf, None))
        if seen is None or now - at >= every_s:
            seen = asyncio.create_task(look())
            self._signs[server.url] = now, seen
        try:
            return await asyncio.shield(seen)
        except (HttpError, TimeoutError, ValueError):
            return None

    async def _watch_losses(self) -> None:
        """Follow the manager's reports of lost servers, and end the calls to them.

        Also serves as this worker's heartbeat.
        """
        after, failures = -1, 0
        while True:
            try:
                lost = await self._manager.lost_servers(after, HOLD_S)
            except (HttpError, ManagerGone) as error:  # callers that need the manager will fail
                failures += 1
                _log.warning("the manager does not answer which servers were lost: %s", error)
                await asyncio.sleep(_BACKOFF.delay(failures))
                continue
            after, failures = lost.seq, 0
            for url in lost.urls:
                for call in list(self._calls_to.get(url.rstrip("/"), ())):
                    call.cancel()

    async def _abort(self, server: GenerationServerClient, rids: Sequence[str], limit_s: float = ANSWER_S) -> None:
        """Abort requests on a server, best effort.

        Each is named by its whole id: SGLang accepts a prefix only if the prefix is itself a live id.
        """
        places = self._places.setdefault(server.url, asyncio.Semaphore(_ABORTS_AT_ONCE))

        async def abort(rid: str) -> None:
            async with places:
                await server.abort(rid)

        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(abort, rids))
        except (HttpError, TimeoutError) as error:
            _log.info("%s could not be asked to abort: %s", server.url, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
