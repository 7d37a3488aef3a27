"""Bring the initial model, every version and the inputs of RolloutWorkers to hosts that share no folder
(`system.shared_filesystem=false`).

`FanOut` decides which host fetches from which. The hosts' staging servers fetch, and report the result, which the fleet
receives. A server generates while its host fetches, and is paused only to load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Never

from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError, HttpRefused, JsonHttp
from asyncrl.comm.waits import ASK_S, LOOK_S, Notifier
from asyncrl.config.run_dir import INPUTS_DIR
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.fleet.servers import Target, host_of
from asyncrl.runtime.plan import MODEL, brings_inputs, staging_hosts
from asyncrl.runtime.process.worker import AsyncWorker
from asyncrl.runtime.run_log import notice
from asyncrl.staging.client import INPUTS, StageRequest, StagingClient, reason_of, source_failed, version_folder
from asyncrl.staging.fan_out import ORIGIN, FanOut, Fetch


@dataclass(slots=True)
class _Folder:
    """Folder that every host needs: its path at the publisher, and the report about it of the staging server on the
    publisher's host.
    """

    published: str
    target: Target | None = None
    at_origin: str = ""
    manifest_sum: str = ""


async def bring_folders(
    manager: AsyncWorker, http: JsonHttp, decisions: FleetDecisions, fleet: FleetRunner, clock: Callable[[], float]
) -> None:
    """Bring folders to the hosts until cancelled: to those of RolloutWorkers the run's inputs, to those of generation
    servers its model and the versions that `fleet` takes.
    """
    config, run_dir = manager.config, manager.run_dir
    hosts = staging_hosts(config)

    def needs(host: int, folder: str) -> bool:
        kind = names.ROLLOUT_WORKER if folder == INPUTS else names.GENERATION_SERVER
        return host == ORIGIN or kind in hosts[host].runs

    inputs = {INPUTS: str(run_dir / INPUTS_DIR)} if brings_inputs(config) else {}
    folders = {**inputs, MODEL: str(config.model.path)}
    tell = partial(notice, run_dir)
    staging = Staging(http, folders, decisions, fleet.arrived, needs=needs, tell=tell, log=manager.log, clock=clock)

    async def follow_servers() -> Never:
        registered = await asyncio.to_thread(manager.resolver.follow, names.STAGING_SERVERS)
        while True:
            staging.registered({names.index_of(key): url for key, url in registered.entries().items()})
            await asyncio.sleep(LOOK_S)

    async def follow_versions() -> Never:
        published: Target | None = None
        while True:
            newest = decisions.targets.newest
            if newest is not None and newest is not published:
                published = newest
                staging.publish(newest)
            await fleet.changed.wait(ASK_S)

    async with asyncio.TaskGroup() as loops:
        for loop in (staging.run(), follow_servers(), follow_versions()):
            loops.create_task(loop)


class Staging:
    """Executes the orders of `FanOut`.

    Args:
        http: connections to the staging servers.
        launch_folders: by name (`asyncrl.staging.client`), folders on the publisher's host that do not
            change during the launch. They are fetched in this order, before any version.
        decisions: knows which versions are in use.
        arrived: called with a host's address and the weights that it has from now on.
        needs: see `FanOut`.
        tell: prints a warning on the terminal, once each time that a host begins to refuse folders.
        clock: seconds in which this process ran.
    """

    def __init__(
        self,
        http: JsonHttp,
        launch_folders: Mapping[str, str],
        decisions: FleetDecisions,
        arrived: Callable[[str, Target], None],
        *,
        needs: Callable[[int, str], bool] = lambda host, folder: True,
        tell: Callable[[str], None],
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http, self._decisions, self._arrived, self._log, self._clock = http, decisions, arrived, log, clock
        self._wanted = {name: _Folder(path) for name, path in launch_folders.items()}
        self._fan_out = FanOut(needs)
        self._fan_out.want(*self._wanted)
        self._urls: dict[int, str] = {}
        self._tell = tell
        self._refusing = set[int]()
        self._changed = Notifier()
        self._tasks: dict[asyncio.Task[None], Fetch] = {}

    def registered(self, urls: Mapping[int, str]) -> None:
        """Set the present staging servers; a new URL is a new process, which has nothing."""
        for host in self._urls.keys() - urls.keys():
            self._log.warning("staging server %d (%s) is gone", host, self._urls[host])
            self._leave(host)
            self._fan_out.removed(host)
        for host, url in urls.items():
            if self._urls.get(host) != url:
                self._leave(host)
                self._urls[host] = url
                self._fan_out.added(host)
                self._changed.notify()

    def publish(self, target: Target) -> None:
        """Record that newer weights are at `target.path` on the publisher's host."""
        of_launch = {name: folder for name, folder in self._wanted.items() if folder.target is None}
        self._wanted = of_launch | {version_folder(target.version): _Folder(target.path, target)}
        self._fan_out.want(*self._wanted)
        self._changed.notify()

    async def run(self) -> Never:
        """Carry out the orders until cancelled."""
        try:
            while True:
                now = self._clock()
                for order in self._fan_out.poll(now):
                    self._spawn(order)
                due = self._fan_out.next_due(now)
                await self._changed.wait(ASK_S if due is None else min(ASK_S, due - now))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _leave(self, host: int) -> None:
        url = self._urls.pop(host, None)
        if url is not None:
            self._decisions.targets.lost(host_of(url))

    def _spawn(self, order: Fetch) -> None:
        folder, url = self._wanted[order.folder], self._urls[order.host]
        task = asyncio.create_task(self._stage(order, url, self._request(order, folder), folder))
        self._tasks[task] = order
        task.add_done_callback(self._ended)

    async def _stage(self, order: Fetch, url: str, request: StageRequest, folder: _Folder) -> None:
        began = self._clock()
        try:
            reply = await StagingClient(self._http, url).stage(request)
        except HttpError as error:
            at_fault = source_failed(error)
            if isinstance(error, HttpRefused) and not at_fault and order.host not in self._refusing:
                self._refusing.add(order.host)
                self._tell(
                    f"WARNING: host {host_of(url)} cannot store {order.folder}, it is tried again: {reason_of(error)}"
                )
            else:
                self._log.warning("%s is not on host %d yet: %s", order.folder, order.host, error)
            self._fan_out.failed(order, self._clock(), source_failed=at_fault)
        else:
            source = "its own disk" if order.source is None else f"host {order.source}"
            self._refusing.discard(order.host)
            message = "%s came to host %d from %s (%.2f s)"
            self._log.info(message, order.folder, order.host, source, self._clock() - began)
            if self._fan_out.succeeded(order):
                if order.source is None:
                    folder.at_origin, folder.manifest_sum = reply.path, reply.manifest_sum
                if folder.target is not None:
                    self._arrived(host_of(url), replace(folder.target, path=folder.at_origin, copy=reply.path))
        self._changed.notify()

    def _request(self, order: Fetch, folder: _Folder) -> StageRequest:
        host = order.host
        keep = {*self._fan_out.sends(host)}
        if host == ORIGIN:  # the log-probability probes of all versions are read there
            keep |= {*map(version_folder, self._decisions.read_on())}
            keep |= {under_way.folder for under_way in self._tasks.values()}
        else:
            keep |= {*map(version_folder, self._decisions.read_on(host_of(self._urls[host])))}
        if order.source is None:
            return StageRequest(order.folder, path=folder.published, keep=tuple(sorted(keep)))
        source = self._urls[order.source]
        return StageRequest(order.folder, source=source, manifest_sum=folder.manifest_sum, keep=tuple(sorted(keep)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        order = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("staging %s on host %d failed", order.folder, order.host, exc_info=error)
            self._fan_out.failed(order, self._clock(), source_failed=False)
            self._changed.notify()
