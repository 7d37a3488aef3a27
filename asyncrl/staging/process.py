"""StagingServer: one on each host with generation servers or RolloutWorkers, if hosts share no folder.

It keeps the initial model and the versions of the actor for servers, and the files that RolloutWorkers read. Each
folder is fetched once for all processes of the host, and passed on to other hosts. The GserverManager decides which
host fetches from which (`asyncrl.staging.fan_out`). The server on the launcher's host also compares other hosts'
code with its own.

Every two seconds, servers on other hosts send the launcher's host the lines that their host's processes wrote to
`observed/`.

The server is a separate process, so that its traffic delays neither training nor generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Final

from asyncrl.comm import names
from asyncrl.comm.http.calls import HttpError, JsonHttp
from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.config.run_dir import STAGED_DIR
from asyncrl.observe import observer
from asyncrl.runtime.process.worker import AsyncWorker
from asyncrl.staging.client import OBSERVED_LIMIT_S, StagingClient
from asyncrl.staging.forwarding import HostClock, ObservedHome, ObservedLines
from asyncrl.staging.messages import LAUNCHER_HOST, ObservedRequest
from asyncrl.staging.service import MAX_OBSERVED_BYTES, StagingService

OBSERVED_EVERY_S: Final = 2.0
_LAST_SEND_S: Final = 1.0
"""Limit of the last attempt to send lines, after a stop was requested."""


class StagingServer(AsyncWorker):
    """Process that stages model folders and input files on its host."""

    always_reports = True

    async def main(self) -> None:
        """Serve until a stop is requested."""
        # its own by number: "hosts" of one machine, or with one disk in spite of all, do not remove each other's
        folder = self.run_dir / STAGED_DIR / str(self.index)
        is_home = self.index == LAUNCHER_HOST
        home = ObservedHome(self.run_dir) if is_home else None
        deltas = self.config.system.version_deltas
        service = StagingService(folder, self.http_security, self._has, home, deltas=deltas)
        lease_s = self.config.system.lease_s
        try:
            url = await service.http.start(self.config.system.host)
            self.resolver.add(names.staging_server_key(self.index), url, lease_s=lease_s, replace=True)
            self.ready()
            if is_home:
                await self.stop.wait()
            else:
                await self._send_observed()
        finally:
            await service.close()

    async def _send_observed(self) -> None:
        """Send the `observed/` lines of this host's processes until a stop is requested, and then once more."""
        http, clock, lines = JsonHttp(self.http_security), HostClock(), ObservedLines(self.run_dir)
        observer.gauges(clock.figures)
        try:
            while not self.stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), OBSERVED_EVERY_S)
                limit_s = _LAST_SEND_S if self.stop.is_set() else OBSERVED_LIMIT_S
                try:
                    async with asyncio.timeout(limit_s):
                        url = await asyncio.to_thread(self.resolver.get, names.staging_server_key(LAUNCHER_HOST))
                        await send_observed(StagingClient(http, url), clock, lines)
                except (HttpError, NameResolveError, OSError, TimeoutError) as error:
                    self.log.debug("lines of observed/ wait: %s: %s", type(error).__name__, error)
        finally:
            await http.close()

    def _has(self, name: str, path: Path) -> None:
        """Announce a folder of the launch to the processes of this host that wait for it."""
        key, lease_s = names.staged_key(name, self.config.system.host), self.config.system.lease_s
        self.resolver.add(key, str(path), lease_s=lease_s, replace=True)
        self.log.info("%s is at %s", name, path)


async def send_observed(home: StagingClient, clock: HostClock, lines: ObservedLines) -> None:
    """Send the next piece of new lines; until the clock's offset is known, an empty request that asks for the time.

    Raises:
        HttpError: the lines did not arrive; they will be sent again.
    """
    ahead_s = clock.ahead_s
    sends = ahead_s is not None and not lines.are_home
    batch = await asyncio.to_thread(lines.take, MAX_OBSERVED_BYTES // 4) if sends else None
    asked_at = time.time()
    reply = await home.observed(ObservedRequest(*batch, ahead_s or 0.0) if batch else ObservedRequest())
    clock.exchanged(asked_at, reply.at, time.time())
    lines.home = reply.home
    if batch is not None:
        lines.arrived(batch)
