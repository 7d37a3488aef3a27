"""Execute the orders of `FleetDecisions`: updates and health checks; and keep the router up to date.

The caller reports servers in name resolution (`registered`) and published weights (`publish`); `run` does the rest.
Each server's update and health check is a separate task, so none waits for another.

A server whose requests were kept (`update_mode=retract`, `in_place`) answers a check only after those in its queue. So
it is checked while it serves already. Otherwise its version, and with it the gate, would wait for the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, HttpTimeout, HttpUnreachable, JsonHttp
from asyncrl.comm.names import GuestMemory
from asyncrl.comm.waits.notifier import Notifier
from asyncrl.inference.client import DamagedVersion, GenerationServerClient, PauseMode, PictureSender
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.logprob_check import WeightsDiffer
from asyncrl.manager.fleet.residence import Residence
from asyncrl.manager.fleet.servers import BeginUpdate, CancelUpdate, CheckHealth, Rest, ServerState, Target
from asyncrl.manager.fleet.servers_in_use import ServersInUse
from asyncrl.manager.fleet.update import UpdateCheck, rest_server, update_server
from asyncrl.manager.messages import ServerStatus
from asyncrl.manager.service import ManagerService
from asyncrl.manager.settings import ManagerConfig
from asyncrl.models.weights.transports.base import ManagerEnd
from asyncrl.observe import observer
from asyncrl.runtime.process.worker import CannotContinue

HEALTH_TIMEOUT_S = 5.0
"""Time limit in seconds of a health check. `/ready` takes milliseconds, or a second if all cores of the machine are
busy.
"""
_LONGEST_IDLE_S = 5.0
_IF_NONE_AGREES = (
    "raise manager.logprob_check_tolerance if this is rounding; else the server computes this model otherwise than "
    "transformers does, so use generation.backend=embedded, or another version of SGLang"
)
Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[logging.Logger]"


class WeightsChanged(HttpError):
    """The server has other weights than the last update loaded."""


class FleetRunner:
    """Runs the fleet of generation servers.

    Args:
        decisions: decides each server's next action.
        service: its router and gate are kept up to date (`ServersInUse`).
        http: connections to the servers.
        transport: brings weights to the servers.
        config: interval of health checks, time limit of an update.
        checks: checks that a server must pass after each update.
        policy: name in `policies` of the servers' policy; empty: the run's own.
        served_version: returns the version by which the gate counts. None: the least version of these servers if they
            serve the run's own policy; else the gate does not depend on them.
        frozen: the servers are not of this run. They are never updated, and their answers count as version 0.
        inline_pictures: see `PictureSender`.
        clock: seconds in which this process ran, for the limits of updates.

    Attributes:
        changed: notified when a server's state changes.
        residence: what the servers that are guests have on their devices.
    """

    def __init__(
        self,
        decisions: FleetDecisions,
        service: ManagerService,
        http: JsonHttp,
        transport: ManagerEnd,
        *,
        config: ManagerConfig,
        checks: Sequence[UpdateCheck] = (),
        policy: str = "",
        served_version: Callable[[], int | None] | None = None,
        frozen: bool = False,
        inline_pictures: bool = False,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decisions = decisions
        self._in_use = ServersInUse(decisions, service, policy, served_version)
        self._http, self._frozen = http, frozen
        self._sender = PictureSender(http, inline=inline_pictures)
        self._transport = transport
        self._config = config
        self._checks = checks
        self._log = log
        self._clock = clock
        self.changed = Notifier()
        self.residence = Residence(decisions.guests, names.POLICY_SERVER if policy else names.GENERATION_SERVER)
        self._updates: dict[int, asyncio.Task[None]] = {}
        self._late_checks: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._checking: set[str] = set()

    def registered(self, servers: Mapping[int, tuple[str, int]]) -> None:
        """Set the servers that name resolution has now: index to (URL, version at registration)."""
        changed = False
        for life in self._decisions.servers:
            if life.index not in servers:
                self._log.warning("generation server %d (%s) is gone", life.index, life.url)
                self.residence.left(life.index)
                changed |= self._decisions.deregister(life.index)
        for index, (url, version) in servers.items():
            memory = self.residence.memory.get(index)
            if self._decisions.register(index, url, version, self._clock(), memory=memory):
                self.residence.registered(index, url)
                self._log.info("generation server %d is at %s with version %d", index, url, version)
                changed = True
        if changed:
            self._in_use.show()
            self.changed.notify()

    def publish(self, target: Target) -> None:
        """Set the newest weights, which were checked."""
        self._decisions.targets.publish(target)
        self.changed.notify()

    def assign(self, server: int, target: Target) -> None:
        """Bring this server to `target`, which was checked."""
        self._decisions.targets.assign(server, target)
        self.changed.notify()

    def arrived(self, host: str, target: Target) -> None:
        """Note that the host at this address has the weights."""
        self._decisions.targets.arrived(host, target)
        self.changed.notify()

    async def run(self) -> None:
        """Carry out the fleet's orders until cancelled.

        Raises:
            CannotContinue: no update makes any server score as the trainer does.
        """
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._watch_health())
                loops.create_task(self._follow_orders())
        finally:
            self.residence.all_left()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> list[ServerStatus]:
        """Return the state of each server for `/status`."""
        return self._in_use.status()

    async def _follow_orders(self) -> None:
        while True:
            for order in self._decisions.poll(self._clock(), self._in_use.running()):
                match order:
                    case BeginUpdate():
                        self._end_late_check(order.server)
                        self._updates[order.attempt] = self._spawn(self._update(order))
                    case Rest():
                        self._end_late_check(order.server)
                        self._updates[order.attempt] = self._spawn(self._rest(order))
                    case CancelUpdate():
                        self._cancel(order)
                    case CheckHealth():
                        self._spawn(self._check(order.server, order.url, ordered=True))
            self._in_use.show()
            if reason := self._decisions.never_agree():
                raise CannotContinue(f"{reason}: {_IF_NONE_AGREES}")
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait for a change, for the next deadline, or, while a server is drained, for the end of a request."""
        due = self._decisions.next_due()
        limit_s = _LONGEST_IDLE_S if due is None else min(_LONGEST_IDLE_S, max(0.0, due - self._clock()))
        changes = {self.changed.next()}
        if any(life.state is ServerState.DRAINING for life in self._decisions.servers):
            changes.add(self._in_use.next_end())
        await asyncio.wait(changes, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for waiter in changes:
            waiter.cancel()

    async def _update(self, order: BeginUpdate) -> None:
        began, began_at, served = self._clock(), time.time(), False
        client = GenerationServerClient(self._http, order.url, self._sender)
        try:
            if order.released:
                self.residence.entered(order.server)
                await self.residence.record(order.server, GuestMemory(order.url, released=False))
            checks = () if order.keeps_requests else self._checks
            resumed = partial(self._decisions.resumed, order.server, order.attempt)
            limit_s = self._config.update_timeout_s
            await update_server(order, client, self._transport, timeout_s=limit_s, checks=checks, resumed=resumed)
            if order.released:
                await self.residence.record(order.server, None)
        except DamagedVersion as error:
            if self._decisions.refused(order.server, order.attempt, str(error), self._clock()):
                told = "v%d is damaged; generation server %d keeps v%d: %s"
                self._log.error(told, order.target.version, order.server, order.had, error)
            else:
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
        except HttpError as error:
            differs = isinstance(error, WeightsDiffer)
            if self._decisions.failed(order.server, order.attempt, str(error), self._clock(), disagrees=differs):
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
        else:
            if served := self._decisions.succeeded(order.server, order.attempt):
                took_ms = 1e3 * (self._clock() - began)
                if order.rested:
                    self.residence.wake_s = took_ms / 1e3
                self._log.info("generation server %d serves v%d (%.0f ms)", order.server, order.target.version, took_ms)
                if order.keeps_requests and self._checks:
                    self._late_checks[order.server] = self._spawn(self._check_late(order, client))
        finally:
            self._updates.pop(order.attempt, None)
            lane = self.residence.lane(order.server)
            observer.span("update", began_at, time.time(), lane=lane, version=order.target.version, served=served)
        self._in_use.show()
        self.changed.notify()

    async def _rest(self, order: Rest) -> None:
        client, began = GenerationServerClient(self._http, order.url), self._clock()
        try:
            await self.residence.record(order.server, GuestMemory(order.url, released=False))
            await rest_server(client, timeout_s=self._config.update_timeout_s)
            await self.residence.record(order.server, GuestMemory(order.url, released=True))
        except HttpError as error:
            if self._decisions.failed(order.server, order.attempt, str(error), self._clock()):
                self._log.warning("generation server %d did not give its memory back: %s", order.server, error)
        else:
            if self._decisions.released(order.server, order.attempt):
                self.residence.left(order.server)
                took_ms = 1e3 * (self._clock() - began)
                self._log.info("generation server %d has given its memory back (%.0f ms)", order.server, took_ms)
        finally:
            self._updates.pop(order.attempt, None)
        self._in_use.show()
        self.changed.notify()

    async def _check_late(self, order: BeginUpdate, client: GenerationServerClient) -> None:
        """Check a server that serves already. If it fails, it leaves service, and no later token of it is returned."""
        try:
            for check in self._checks:
                await check(order.server, client, order.target)
        except HttpTimeout as error:
            self._log.info("v%d on generation server %d was not checked: %s", order.target.version, order.server, error)
        except HttpError as error:
            differs = isinstance(error, WeightsDiffer)
            if self._decisions.contradicted(order.server, order.attempt, str(error), self._clock(), disagrees=differs):
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
                self._in_use.show()
                self.changed.notify()
                try:
                    await client.pause(PauseMode.retract, timeout_s=self._config.update_timeout_s)
                except HttpError as unpaused:
                    self._log.warning("generation server %d cannot be paused: %s", order.server, unpaused)

    def _end_late_check(self, server: int) -> None:
        """Cancel a running late check of the server: the weights that it checks are about to be replaced."""
        if (check := self._late_checks.pop(server, None)) is not None:
            check.cancel()

    def _cancel(self, order: CancelUpdate) -> None:
        if (update := self._updates.pop(order.attempt, None)) is not None:
            update.cancel()
            self._log.warning("generation server %d: an update was given up", order.server)

    async def _watch_health(self) -> None:
        while True:
            for life in self._decisions.servers:
                if life.state in (ServerState.SERVING, ServerState.DRAINING) and life.url not in self._checking:
                    self._spawn(self._check(life.index, life.url))
            await asyncio.sleep(self._config.health_interval_s)

    async def _check(self, server: int, url: str, *, ordered: bool = False) -> None:
        """Check the server's health.

        Nothing is notified if a serving server is healthy, as that happens for many servers each second.

        Args:
            ordered: the server is in quarantine until then.
        """
        self._checking.add(url)
        expected = self._decisions.expected_version(server, url)
        client = GenerationServerClient(self._http, url, frozen=self._frozen)
        try:
            await client.ready(timeout_s=HEALTH_TIMEOUT_S)
            served = await client.served_version()
            if expected is not None and expected == self._decisions.expected_version(server, url) != served:
                raise WeightsChanged(f"{url} names v{served}, it was brought to v{expected}: was it started again?")
        except HttpError as error:
            gone = isinstance(error, (HttpUnreachable, WeightsChanged))
            if changed := self._decisions.unhealthy(server, url, str(error), self._clock(), gone=gone):
                self._log.warning("generation server %d gets no requests for now: %s", server, error)
        else:
            if changed := self._decisions.healthy(server, url):
                self._log.info("generation server %d gets requests again", server)
        finally:
            self._checking.discard(url)
        if changed or ordered:
            self._in_use.show()
            self.changed.notify()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("looking after a generation server failed", exc_info=error)
