"""Execute the orders of `FleetDecisions`: updates and health checks; and keep the router and the gate up to date.

The caller reports servers in name resolution (`registered`) and published weights (`publish`); `FleetRunner.run` does
the rest. Each server's update and health check is a separate task, so none waits for another. `ServerUpdater` has the
calls of one update: pause, load, continue, check.

Check of log-probabilities
--------------------------
After each weight update the server has to score fixed prompts as the trainer did when it published (`LogprobCheck`). A
difference above rounding means another model than the trainer's: weights of another version, tensors that were not
replaced, or stale entries in a cache. The server is then quarantined and updated again, with its caches flushed, until
it agrees. If no server ever does (`FleetDecisions.never_agree`) the run ends. The check cannot detect a change smaller
than the rounding of the server's data type.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from asyncrl.api.picture import PictureError
from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError, HttpTimeout, HttpUnreachable, JsonHttp
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.waits import ANSWER_S, ASK_S, Notifier
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.client import DamagedVersion, GenerationServerClient, MemoryTag, PauseMode, PictureSender
from asyncrl.inference.settings import backends_that
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.servers import BeginUpdate, CancelUpdate, CheckHealth, Sleep, Target
from asyncrl.manager.messages import ServerState, ServerStatus
from asyncrl.manager.service import ManagerService
from asyncrl.observe import observer
from asyncrl.runtime.process.worker import CannotContinue
from asyncrl.trainer.messages import SendWeights
from asyncrl.weights.logprob_probe import read_probe
from asyncrl.weights.manifest import ManifestError
from asyncrl.weights.transports.base import ManagerEnd

FLOAT32_TOLERANCE = 1e-3
"""In nats. Two float32 implementations differ by about 1e-5 for log-probabilities around -10."""
COARSE_TOLERANCE = 0.5
"""In nats. bfloat16 has 8 bits of mantissa: logits between 16 and 32 are rounded to multiples of 0.125. With trained
weights (SmolLM2-135M) two right implementations differ by 0.09 in the mean, and by 0.45 at one of a hundred tokens.
"""
QUANTISED_TOLERANCE = 1.0
"""In nats, for servers that quantise weights: fp8 has 3 bits of mantissa."""
Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[logging.Logger]"
UpdateCheck = Callable[[int, GenerationServerClient, Target], Awaitable[None]]
"""Checks that the server with this index has the target's weights. Raises `HttpError` if it has others."""

UNKNOWN_VERSION = -1
"""Version of a server whose weights are unknown; it gets no requests."""
_UNUSED = (ServerState.QUARANTINED, ServerState.ASLEEP)
_IF_NONE_AGREES = (
    "raise manager.logprob_check_tolerance if this is rounding; else the server computes this model otherwise than "
    f"transformers does, so use generation.backend={backends_that(lambda kind: kind.same_arithmetic)}, or another "
    "version of the engine"
)


class WeightsChanged(HttpError):
    """The server has other weights than the last update loaded."""


class FleetRunner:
    """Runs the fleet of generation servers of one policy.

    Args:
        service: its router and gate are kept up to date, and its clients learn of lost servers.
        indices: indices of the policy's servers among those of the `kind`; None: all.
        policy: name in `policies` of the servers' policy; empty: the run's own.
        served_version: returns the version by which the gate counts; None: the gate does not depend on these servers.
        frozen: the servers are not part of this run. They are never updated, and their answers count as version 0.
        resolver: keeps what memory colocated servers have released, for a later manager; None: it is not kept.
        clock: seconds in which this process ran, for the limits of updates.
        tell: shows a person that a server fell silent in an update, once until it serves again.

    Attributes:
        changed: notified when a server's state changes.
        server_memory: by index, the colocated servers whose memory is released, or may be.
        wake_s: seconds that the last woken colocated server took until it served.
    """

    def __init__(
        self,
        decisions: FleetDecisions,
        service: ManagerService,
        updater: ServerUpdater,
        http: JsonHttp,
        *,
        health_interval_s: float,
        kind: str = names.GENERATION_SERVER,
        indices: Collection[int] | None = None,
        policy: str = "",
        served_version: Callable[[], int | None] | None = None,
        frozen: bool = False,
        resolver: NameResolver | None = None,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.decisions, self._service, self._updater, self._http = decisions, service, updater, http
        self._health_interval_s, self._policy, self._frozen = health_interval_s, policy, frozen
        self.kind, self._indices = kind, indices
        self._resolver, self._log, self._clock, self._tell = resolver, log, clock, tell
        self._router = service.routes.router_of(policy)
        self._served_version = served_version or (lambda: None)
        self.changed = Notifier()
        self.server_memory: dict[int, names.ServerMemory] = {}
        self.wake_s = 0.0
        self._on_device_since: dict[int, float] = {}
        self._updates: dict[int, asyncio.Task[None]] = {}
        self._late_checks: dict[int, asyncio.Task[None]] = {}
        self._health_checks: set[str] = set()  # URLs of the servers that are asked now
        self._tasks: set[asyncio.Task[None]] = set()
        self._statuses: dict[int, str] = {}
        self._shown: dict[int, tuple[str, bool]] = {}  # to the router: URL, and whether clients may wait there

    def registered(self, servers: Mapping[int, tuple[str, int]]) -> None:
        """Set the servers of the kind that name resolution has now: index to (URL, version at registration)."""
        changed = False
        if self._indices is not None:
            servers = {index: servers[index] for index in servers.keys() & self._indices}
        for record in self.decisions.servers:
            if record.index not in servers:
                self._log.warning("generation server %d (%s) is gone", record.index, record.url)
                self._left_device(record.index)
                changed |= self.decisions.deregister(record.index)
        for index, (url, version) in sorted(servers.items()):
            memory = self.server_memory.get(index)
            if self.decisions.register(index, url, version, self._clock(), memory=memory):
                if memory is None or memory.url != url:  # a new process has its memory on the device
                    self._entered_device(index)
                self._log.info("generation server %d is at %s with version %d", index, url, version)
                changed = True
        if changed:
            self._update_routes()

    def reported(self, statuses: Mapping[int, str]) -> None:
        """Set the statuses of servers' processes that name resolution has now: one that changes is a sign of life."""
        for index, status in statuses.items():
            if self._statuses.get(index) != status:
                self.decisions.worked(index, self._clock())
        self._statuses = dict(statuses)

    def publish(self, target: Target) -> None:
        """Set the newest weights, which were checked."""
        self.decisions.targets.publish(target)
        self.changed.notify()

    def assign(self, server: int, target: Target) -> None:
        """Update this server to `target`, which was checked."""
        self.decisions.targets.assign(server, target)
        self.changed.notify()

    def arrived(self, host: str, target: Target) -> None:
        """Record that the host at this address has the weights."""
        self.decisions.targets.arrived(host, target)
        self.changed.notify()

    def status(self) -> list[ServerStatus]:
        """Return the state of each server for `/status`."""
        views = {view.index: view for view in self._router.servers}
        return [
            ServerStatus(
                index=record.index,
                url=record.url,
                state=record.state,
                version=record.version,
                goal=None if record.goal is None else record.goal.version,
                reason=record.reason,
                failures=record.failures,
                sequences=views[record.index].sequences if record.index in views else 0,
                tokens=views[record.index].tokens if record.index in views else 0,
                policy=self._policy,
            )
            for record in self.decisions.servers
        ]

    async def run(self) -> None:
        """Carry out the fleet's orders until cancelled.

        Raises:
            CannotContinue: no update makes any server score as the trainer does.
        """
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._check_those_in_service())
                loops.create_task(self._follow_orders())
        finally:
            for server in [*self._on_device_since]:
                self._left_device(server)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow_orders(self) -> None:
        while True:
            running = {view.index: view.sequences for view in self._router.servers}
            for order in self.decisions.poll(self._clock(), running):
                match order:
                    case BeginUpdate() | Sleep():
                        if (check := self._late_checks.pop(order.server, None)) is not None:
                            check.cancel()  # the weights that it checks are about to be replaced
                        work = self._update(order) if isinstance(order, BeginUpdate) else self._sleep(order)
                        self._updates[order.attempt] = self._spawn(work)
                    case CancelUpdate():
                        self._cancel(order)
                    case CheckHealth():
                        self._spawn(self._check_health(order.server, order.url, ordered=True))
            self._show_servers()
            if reason := self.decisions.never_agree():
                raise CannotContinue(f"{reason}: {_IF_NONE_AGREES}")
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait for a change or the next deadline; while a server is drained also for the end of a request."""
        due = self.decisions.next_due()
        limit_s = ASK_S if due is None else min(ASK_S, max(0.0, due - self._clock()))
        changes = {self.changed.next()}
        if any(record.state is ServerState.DRAINING for record in self.decisions.servers):
            changes.add(self._service.progress.next())
        await asyncio.wait(changes, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for waiter in changes:
            waiter.cancel()

    async def _update(self, order: BeginUpdate) -> None:
        began, began_at, served = self._clock(), time.time(), False
        try:
            if order.released:
                self._entered_device(order.server)
                await self._record_memory(order.server, names.ServerMemory(order.url, released=False))
            resumed = partial(self.decisions.resumed, order.server, order.attempt)
            await self._updater.update(order, resumed, lambda: self.decisions.worked(order.server, self._clock()))
            if order.released:
                await self._record_memory(order.server, None)
        except DamagedVersion as error:
            if self.decisions.refused(order.server, order.attempt, str(error), self._clock()):
                pattern = "v%d is damaged; generation server %d keeps v%d: %s"
                self._log.error(pattern, order.target.version, order.server, order.had, error)
            else:
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
        except HttpError as error:
            differs = isinstance(error, WeightsDiffer)
            if self.decisions.failed(order.server, order.attempt, str(error), self._clock(), disagrees=differs):
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
        else:
            if served := self.decisions.succeeded(order.server, order.attempt):
                took_ms = 1e3 * (self._clock() - began)
                if order.slept:
                    self.wake_s = took_ms / 1e3
                self._log.info("generation server %d serves v%d (%.0f ms)", order.server, order.target.version, took_ms)
                if order.keeps_requests:
                    self._late_checks[order.server] = self._spawn(self._check_late(order))
        finally:
            self._updates.pop(order.attempt, None)
            lane = f"{self.kind}/{order.server}"
            observer.span("update", began_at, time.time(), lane=lane, version=order.target.version, served=served)
        self._update_routes()

    async def _sleep(self, order: Sleep) -> None:
        began = self._clock()
        try:
            await self._record_memory(order.server, names.ServerMemory(order.url, released=False))
            await self._updater.put_to_sleep(order)
            await self._record_memory(order.server, names.ServerMemory(order.url, released=True))
        except HttpError as error:
            if self.decisions.failed(order.server, order.attempt, str(error), self._clock()):
                self._log.warning("generation server %d did not release its memory: %s", order.server, error)
        else:
            if self.decisions.released(order.server, order.attempt):
                self._left_device(order.server)
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
            if self.decisions.contradicted(order.server, order.attempt, str(error), self._clock(), disagrees=differs):
                self._log.warning("generation server %d: no v%d: %s", order.server, order.target.version, error)
                self._update_routes()
                try:
                    await self._updater.pause(order.url)
                except HttpError as unpaused:
                    self._log.warning("generation server %d cannot be paused: %s", order.server, unpaused)

    def _cancel(self, order: CancelUpdate) -> None:
        if (update := self._updates.pop(order.attempt, None)) is not None:
            update.cancel()
            self._log.warning("generation server %d: an update was cancelled: %s", order.server, order.reason)
        for record in self.decisions.servers:
            if (record.index, record.reason, record.failures) == (order.server, order.reason, 1):
                self._tell(f"WARNING: {self.kind}/{record.index} is left out and updated again: {order.reason}")

    def _update_routes(self) -> None:
        """Update the router and the gate, and notify all tasks that wait for a server's state."""
        self._show_servers()
        self.changed.notify()

    def _show_servers(self) -> None:
        """Update the router and the gate, and report servers that left service to clients."""
        records = {record.index: record for record in self.decisions.servers}
        self._router.returning = sum(
            record.state is ServerState.UPDATING and not record.failures for record in records.values()
        )
        for index, (url, in_use) in list(self._shown.items()):
            record = records.get(index)
            if record is None or record.url != url:
                self._router.remove(index)
                self._service.routes.server_lost(url)
                del self._shown[index]
            elif in_use and record.state in _UNUSED:  # a sleeping server answers no request
                self._service.routes.server_lost(url)
        for index, record in records.items():
            self._shown[index] = (record.url, record.state not in _UNUSED)
            version = UNKNOWN_VERSION if record.version is None else record.version
            self._router.update(index, record.url, version, record.state is ServerState.SERVING)
        self._service.routes_changed(self._served_version())

    async def _check_those_in_service(self) -> None:
        """Check the health of the servers in service until cancelled, each in a separate task."""
        while True:
            for record in self.decisions.servers:
                if (
                    record.state in (ServerState.SERVING, ServerState.DRAINING)
                    and record.url not in self._health_checks
                ):
                    self._spawn(self._check_health(record.index, record.url))
            await asyncio.sleep(self._health_interval_s)

    async def _check_health(self, server: int, url: str, *, ordered: bool = False) -> None:
        """Check the server's health.

        A healthy server in service causes no notification, since that happens for many servers each second.

        Args:
            ordered: the server is in quarantine until the check succeeds.
        """
        self._health_checks.add(url)
        expected = self.decisions.expected_version(server, url)
        client = GenerationServerClient(self._http, url, frozen=self._frozen)
        try:
            await client.ready(timeout_s=ANSWER_S)
            served = await client.served_version()
            if expected is not None and expected == self.decisions.expected_version(server, url) != served:
                raise WeightsChanged(f"{url} reports v{served}, but was updated to v{expected}: was it started again?")
        except HttpError as error:
            gone = isinstance(error, (HttpUnreachable, WeightsChanged))
            if changed := self.decisions.unhealthy(server, url, str(error), self._clock(), gone=gone):
                self._log.warning("generation server %d gets no requests for now: %s", server, error)
        else:
            if changed := self.decisions.healthy(server, url):
                self._log.info("generation server %d gets requests again", server)
        finally:
            self._health_checks.discard(url)
        if changed or ordered:
            self._update_routes()

    async def _record_memory(self, server: int, memory: names.ServerMemory | None) -> None:
        """Record the state of the colocated server's memory, before it changes and afterwards; None: it has all of
        it.
        """
        if memory is None:
            self.server_memory.pop(server, None)
        else:
            self.server_memory[server] = memory
        if self._resolver is None:
            return
        key = names.server_memory_key(server)
        if memory is None:
            await asyncio.to_thread(self._resolver.delete, key)
        else:
            await asyncio.to_thread(self._resolver.add, key, memory.encode(), replace=True)

    def _entered_device(self, server: int) -> None:
        """Record that the server has memory on its device from now on, if it had none."""
        self._on_device_since.setdefault(server, time.time())

    def _left_device(self, server: int) -> None:
        """Write the span in which the server had memory on its device, if it is colocated."""
        since = self._on_device_since.pop(server, None)
        if since is not None and server in self.decisions.colocated:
            observer.span("resident", since, time.time(), lane=f"{self.kind}/{server}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a task for a generation server failed", exc_info=error)


class ServerUpdater:
    """Makes the calls of one order to one server. Different servers' orders may run at the same time.

    Args:
        timeout_s: limit of silence. The caller ends an update or a sleep without a sign of life, so their calls have no
            limit.
        check: a check that a server must pass after each update; None: none.
        keeps_pictures, pause_ends_requests: see `asyncrl.inference.backend.Backend`.
    """

    def __init__(
        self,
        http: JsonHttp,
        transport: ManagerEnd,
        *,
        timeout_s: float,
        check: UpdateCheck | None = None,
        keeps_pictures: bool = True,
        pause_ends_requests: bool = True,
    ) -> None:
        self._http, self._sender = http, PictureSender(http, inline=not keeps_pictures)
        self._pause_ends_requests = pause_ends_requests
        self._transport, self._timeout_s, self._check = transport, timeout_s, check

    async def update(
        self,
        order: BeginUpdate,
        resumed: Callable[[Collection[MemoryTag]], None] = lambda _: None,
        sending: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring the server to the order's target, then let it generate again.

        A server that slept is already paused. It allocates the memory of its weights first, and the rest only after the
        update, since reading the weights may need memory. `resumed` is called with the kinds that are allocated,
        `sending` from time to time while the trainer sends weights.

        Running requests are answered or kept, according to the order. New ones wait until the server has its weights.
        If a step or a check fails the server stays paused: its weights are unknown, so it must not generate. A server
        that refuses damaged files continues with the weights that it had (`order.had`).

        A server whose requests were kept answers a check only after those in its queue. So it is checked by `check`,
        while it serves already. Otherwise its version, and with it the gate, would wait for the queue.

        Raises:
            DamagedVersion: the server continues with the version that it had.
            HttpError: a step or a check failed.
        """
        client = self._client(order.url)

        async def resume_memory(tags: Collection[MemoryTag]) -> None:
            if tags:
                await client.resume_memory(sorted(tags), timeout_s=math.inf)
                resumed(tags)

        if not order.slept:
            await self._pause(order, client)
        await resume_memory(order.released & {MemoryTag.weights})
        wanted = SendWeights(order.server, client.url, order.target.version, order.keeps_cache, self._timeout_s)
        try:
            await self._transport.bring(client, wanted, order.target.read_at, sending)
        except DamagedVersion:
            if order.had is not None:
                await client.resume()
            raise
        await resume_memory(order.released - {MemoryTag.weights})
        await client.resume()
        if self._check is not None and not order.keeps_requests:  # after `resume`: a paused server answers nothing
            try:
                await self._check(order.server, client, order.target)
            except HttpError:
                await client.pause(PauseMode.retract, timeout_s=math.inf)  # it returns no token of these weights
                raise

    async def check(self, order: BeginUpdate) -> None:
        """Check a server that has the order's target.

        Raises:
            HttpTimeout: it was not checked within the limit of silence: it serves, so its requests come first.
            HttpError: a check failed.
        """
        if self._check is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._check(order.server, self._client(order.url), order.target)
        except TimeoutError as error:
            raise HttpTimeout(f"{order.url} did not answer within {self._timeout_s:g} s") from error

    async def pause(self, url: str) -> None:
        """Pause the server with its requests, so that it returns no token of its present weights."""
        await self._client(url).pause(PauseMode.retract, timeout_s=self._timeout_s)

    async def put_to_sleep(self, order: Sleep) -> None:
        """Have the server answer running requests with their tokens so far, and release its memory. It stays paused."""
        client = self._client(order.url)
        await client.pause(PauseMode.abort, timeout_s=math.inf)
        await client.release_memory([*MemoryTag], timeout_s=math.inf)

    def _client(self, url: str) -> GenerationServerClient:
        return GenerationServerClient(self._http, url, self._sender)

    async def _pause(self, order: BeginUpdate, client: GenerationServerClient) -> None:
        if order.frozen:  # SGLang aborts frozen requests only once it runs again, but queued ones at once
            await client.pause(PauseMode.retract, timeout_s=math.inf)
        elif order.pause == PauseMode.abort and not self._pause_ends_requests and await client.end_running():
            # SGLang's pause with `abort` looks once a second whether requests have ended.
            await client.pause(PauseMode.retract, timeout_s=math.inf)
            await client.abort_all()  # requests that came since, which wait in the queue
            return
        await client.pause(order.pause, timeout_s=math.inf)


class WeightsDiffer(HttpError):
    """The server's scores of the probe differ from the trainer's."""


def logprob_check_tolerance(config: ExperimentConfig) -> float:
    """`manager.logprob_check_tolerance` in nats, or a default for the data types if it is null."""
    if config.manager.logprob_check_tolerance is not None:
        return config.manager.logprob_check_tolerance
    if config.generation.engine.quantised:
        return QUANTISED_TOLERANCE
    model = config.model
    published = model.dtype if model.publish_dtype == Dtype.auto else model.publish_dtype
    exact = model.dtype == published == config.generation.dtype == Dtype.float32
    return FLOAT32_TOLERANCE if exact else COARSE_TOLERANCE


class LogprobCheck:
    """An `UpdateCheck`: raises `WeightsDiffer` if the log-probabilities of a sequence differ by more than the tolerance
    in the mean. A single token may differ by more: rounding in 16 bits has no small bound.

    Weights without a probe pass: they do not come from asyncrl's trainer.

    Args:
        tolerance: in nats, above 0.

    Attributes:
        differences: the largest mean difference of a sequence at each server's last check, in nats.
        alarms: number of checks that found a larger difference than allowed.
    """

    def __init__(self, tolerance: float, log: logging.Logger) -> None:
        self.tolerance = tolerance
        self.differences: dict[int, float] = {}
        self.alarms = 0
        self._log = log

    async def __call__(self, server: int, client: GenerationServerClient, target: Target) -> None:
        """Check the server with this index, which should serve `target`. The caller limits the time."""
        try:
            probe = await asyncio.to_thread(read_probe, Path(target.path))
        except (ManifestError, OSError) as error:
            raise HttpError(f"the probe of v{target.version} cannot be read: {error}") from error
        if probe is None:
            return
        try:
            pictures = [() if each.picture is None else (each.picture.placed,) for each in probe.sequences]
        except PictureError as error:
            raise HttpError(f"the probe of v{target.version} has a damaged picture: {error}") from error
        served = await asyncio.gather(
            *(
                client.prompt_logprobs(each.token_ids, each.start, timeout_s=math.inf, pictures=shown)
                for each, shown in zip(probe.sequences, pictures, strict=True)
            )
        )
        scores = [
            [(index, each.logprobs[index], value) for index, value in enumerate(values, each.start + 1)]
            for each, values in zip(probe.sequences, served, strict=True)
        ]
        self._compare(server, target.version, scores)

    def _compare(self, server: int, version: int, scores: Sequence[Sequence[tuple[int, float, float]]]) -> None:
        """Compare the `scores`: by sequence, the place of each token, with the trainer's and the server's score."""
        means = {
            sequence: fmean(abs(trained - served) for _, trained, served in tokens)
            for sequence, tokens in enumerate(scores)
            if tokens
        }
        sequence, difference = max(means.items(), key=lambda mean: (math.isnan(mean[1]), mean[1]))
        index, trained, served = max(scores[sequence], key=lambda token: abs(token[1] - token[2]))
        self.differences[server] = difference
        if difference <= self.tolerance:
            self._log.info("generation server %d agrees with the trainer on v%d to %.1e", server, version, difference)
            return
        self.alarms += 1
        message = (
            f"generation server {server} does not serve the trainer's v{version}: it gives token {index} of "
            f"the probe's sequence {sequence} the log-probability {served:.6g}, the trainer "
            f"{trained:.6g}; the difference {difference:.3g} is above "
            f"manager.logprob_check_tolerance={self.tolerance:g}"
        )
        self._log.error("%s; the server is updated again. Raise the tolerance if this is rounding", message)
        raise WeightsDiffer(message)
