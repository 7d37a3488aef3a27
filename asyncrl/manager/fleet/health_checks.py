"""Health checks of generation servers: regular ones of those in service, and ordered ones of those in quarantine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from asyncrl.comm.http.calls import HttpError, HttpUnreachable, JsonHttp
from asyncrl.comm.waits.limits import ANSWER_S
from asyncrl.inference.client import GenerationServerClient
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.servers import CheckHealth
from asyncrl.manager.messages import ServerState

Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[logging.Logger]"


class WeightsChanged(HttpError):
    """The server has other weights than the last update loaded."""


class HealthChecks:
    """Checks servers and reports the results to `decisions`.

    Args:
        http: connections to the servers.
        frozen: see `GenerationServerClient`.
        interval_s: time between two checks of a server in service.
        spawn: starts a task that ends with the fleet.
        changed: called when a check changed whether a server gets requests, and after an ordered check.
        clock: seconds in which this process ran.
    """

    def __init__(
        self,
        decisions: FleetDecisions,
        http: JsonHttp,
        *,
        frozen: bool,
        interval_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._decisions, self._http, self._frozen, self._interval_s = decisions, http, frozen, interval_s
        self._spawn, self._changed, self._log, self._clock = spawn, changed, log, clock
        self._under_way: set[str] = set()

    async def run(self) -> None:
        """Check the servers in service until cancelled, each in a separate task."""
        while True:
            for life in self._decisions.servers:
                if life.state in (ServerState.SERVING, ServerState.DRAINING) and life.url not in self._under_way:
                    self._spawn(self._check(life.index, life.url))
            await asyncio.sleep(self._interval_s)

    def begin(self, order: CheckHealth) -> None:
        """Check a server in quarantine."""
        self._spawn(self._check(order.server, order.url, ordered=True))

    async def _check(self, server: int, url: str, *, ordered: bool = False) -> None:
        """Check the server's health.

        A healthy server in service causes no notification, since that happens for many servers each second.

        Args:
            ordered: the server is in quarantine until the check succeeds.
        """
        self._under_way.add(url)
        expected = self._decisions.expected_version(server, url)
        client = GenerationServerClient(self._http, url, frozen=self._frozen)
        try:
            await client.ready(timeout_s=ANSWER_S)
            served = await client.served_version()
            if expected is not None and expected == self._decisions.expected_version(server, url) != served:
                raise WeightsChanged(f"{url} reports v{served}, but was updated to v{expected}: was it started again?")
        except HttpError as error:
            gone = isinstance(error, (HttpUnreachable, WeightsChanged))
            if changed := self._decisions.unhealthy(server, url, str(error), self._clock(), gone=gone):
                self._log.warning("generation server %d gets no requests for now: %s", server, error)
        else:
            if changed := self._decisions.healthy(server, url):
                self._log.info("generation server %d gets requests again", server)
        finally:
            self._under_way.discard(url)
        if changed or ordered:
            self._changed()
