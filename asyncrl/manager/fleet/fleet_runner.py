"""Execute the orders of `FleetDecisions`: updates and health checks; and keep the router up to date.

The caller reports servers in name resolution (`registered`) and published weights (`publish`); `run` does the rest.
Each server's update and health check is a separate task, so none waits for another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, HttpTimeout, JsonHttp
from asyncrl.comm.waits.limits import ASK_S
from asyncrl.comm.waits.notifier import Notifier
from asyncrl.inference.client import DamagedVersion
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.guests.residence import Residence
from asyncrl.manager.fleet.health_checks import HealthChecks, Log
from asyncrl.manager.fleet.logprob_check import WeightsDiffer
from asyncrl.manager.fleet.servers import BeginUpdate, CancelUpdate, CheckHealth, Rest, Target
from asyncrl.manager.fleet.servers_in_use import ServersInUse
from asyncrl.manager.fleet.update import ServerUpdater
from asyncrl.manager.messages import ServerState
from asyncrl.observe import observer
from asyncrl.runtime.process.worker import CannotContinue

_IF_NONE_AGREES = (
    "raise manager.logprob_check_tolerance if this is rounding; else the server computes this model otherwise than "
    "transformers does, so use generation.backend=embedded, or another version of SGLang"
)


class FleetRunner:
    """Runs the fleet of generation servers.

    Args:
        decisions: decides each server's next action.
        in_use: keeps the router and the gate up to date.
        updater: makes the calls of updates and rests.
        http: connections to the servers, for health checks.
        health_interval_s: time between two health checks of a server.
        kind: process kind of the servers.
        frozen: the servers are not part of this run. They are never updated, and their answers count as version 0.
        clock: seconds in which this process ran, for the limits of updates.
        tell: shows a person that a server fell silent in an update, once until it serves again.

    Attributes:
        in_use: the servers that get requests.
        changed: notified when a server's state changes.
        residence: memory that the guests hold on their devices.
    """

    def __init__(
        self,
        decisions: FleetDecisions,
        in_use: ServersInUse,
        updater: ServerUpdater,
        http: JsonHttp,
        *,
        health_interval_s: float,
        kind: str = names.GENERATION_SERVER,
        frozen: bool = False,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._decisions, self.in_use, self._updater = decisions, in_use, updater
        self._log, self._clock, self._tell, self._kind = log, clock, tell, kind
        self.changed = Notifier()
        self.residence = Residence(decisions.guests, kind)
        self._updates: dict[int, asyncio.Task[None]] = {}
        self._late_checks: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._statuses: dict[int, str] = {}
        self._health = HealthChecks(
            decisions,
            http,
            frozen=frozen,
            interval_s=health_interval_s,
            spawn=self._spawn,
            changed=self._update_routes,
            log=log,
            clock=clock,
        )

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
            self._update_routes()

    def reported(self, statuses: Mapping[int, str]) -> None:
        """Set the statuses of servers' processes that name resolution has now: one that changes is a sign of life."""
        for index, status in statuses.items():
            if self._statuses.get(index) != status:
                self._decisions.worked(index, self._clock())
        self._statuses = dict(statuses)

    def publish(self, target: Target) -> None:
        """Set the newest weights, which were checked."""
        self._decisions.targets.publish(target)
        self.changed.notify()

    def assign(self, server: int, target: Target) -> None:
        """Update this server to `target`, which was checked."""
        self._decisions.targets.assign(server, target)
        self.changed.notify()

    def arrived(self, host: str, target: Target) -> None:
        """Record that the host at this address has the weights."""
        self._decisions.targets.arrived(host, target)
        self.changed.notify()

    async def run(self) -> None:
        """Carry out the fleet's orders until cancelled.

        Raises:
            CannotContinue: no update makes any server score as the trainer does.
        """
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._health.run())
                loops.create_task(self._follow_orders())
        finally:
            self.residence.all_left()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_orders(self) -> None:
        while True:
            for order in self._decisions.poll(self._clock(), self.in_use.running()):
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
                        self._health.begin(order)
            self.in_use.update_routes()
            if reason := self._decisions.never_agree():
                raise CannotContinue(f"{reason}: {_IF_NONE_AGREES}")
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait for a change or the next deadline; while a server is drained also for the end of a request."""
        due = self._decisions.next_due()
        limit_s = ASK_S if due is None else min(ASK_S, max(0.0, due - self._clock()))
        changes = {self.changed.next()}
        if any(life.state is ServerState.DRAINING for life in self._decisions.servers):
            changes.add(self.in_use.next_end())
        await asyncio.wait(changes, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for waiter in changes:
            waiter.cancel()

    async def _update(self, order: BeginUpdate) -> None:
        began, began_at, served = self._clock(), time.time(), False
        try:
            if order.released:
                self.residence.entered(order.server)
                await self.residence.record(order.server, names.GuestMemory(order.url, released=False))
            resumed = partial(self._decisions.resumed, order.server, order.attempt)
            await self._updater.update(order, resumed, lambda: self._decisions.worked(order.server, self._clock()))
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
                if order.keeps_requests:
                    self._late_checks[order.server] = self._spawn(self._check_late(order))
        finally:
            self._updates.pop(order.attempt, None)
            lane = self.residence.lane(order.server)
            observer.span("update", began_at, time.time(), lane=lane, version=order.target.version, served=served)
        self._update_routes()

    async def _rest(self, order: Rest) -> None:
        began = self._clock()
        try:
            await self.residence.record(order.server, names.GuestMemory(order.url, released=False))
            await self._updater.rest(order)
            await self.residence.record(order.server, names.GuestMemory(order.url, released=True))
        except HttpError as error:
            if self._decisions.failed(order.server, order.attempt, str(error), self._clock()):
                self._log.warning("generation server %d did not release its memory: %s", order.server, error)
        else:
            if self._decisions.released(order.server, order.attempt):
                self.residence.left(order.server)
                took_ms = 1e3 * (self._clock() - began)
                self._log.info("generation server %d has released its memory (%.0f ms)", order.server, took_ms)
        finally:
            self._updates.pop(order.attempt, None)
        self._update_routes()

    async def _check_late(self, order: BeginUpdate) -> None:
        """Check a server that serves already. If it fails, it leaves service, and no later token of it is returned."""
        try:
            await self._updater.check(order)
        except HttpTimeout as error:
            self._log.info("v%d on generation server %d was not checked: %s", order.target.version, order.server, error)
        except HttpError as error:
            differs = isinstance(error, WeightsDiffer)
            if self._decisions.contradicted(order.server, order.attempt, str(error), self._clock(), disagrees=differs):
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
                self._update_routes()
                try:
                    await self._updater.pause(order.url)
                except HttpError as unpaused:
                    self._log.warning("generation server %d cannot be paused: %s", order.server, unpaused)

    def _end_late_check(self, server: int) -> None:
        """Cancel a running late check of the server: the weights that it checks are about to be replaced."""
        if (check := self._late_checks.pop(server, None)) is not None:
            check.cancel()

    def _cancel(self, order: CancelUpdate) -> None:
        if (update := self._updates.pop(order.attempt, None)) is not None:
            update.cancel()
            self._log.warning("generation server %d: an update was cancelled: %s", order.server, order.reason)
        for life in self._decisions.servers:
            if (life.index, life.reason, life.failures) == (order.server, order.reason, 1):
                self._tell(f"WARNING: {self._kind}/{life.index} is left out and updated again: {order.reason}")

    def _update_routes(self) -> None:
        """Update the router and the gate, and notify all tasks that wait for a server's state."""
        self.in_use.update_routes()
        self.changed.notify()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a task for a generation server failed", exc_info=error)
