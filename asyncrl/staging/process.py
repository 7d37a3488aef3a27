"""StagingServer: one on each host with generation servers or RolloutWorkers, if hosts share no folder.

It keeps the initial model and the versions of the actor for servers, and the files that RolloutWorkers read. Each
folder is fetched once for all processes of the host, and passed on to other hosts. The GserverManager decides which
host fetches from which (`asyncrl.staging.fan_out`). The server on the launcher's host also compares other hosts' code
with its own.

Every two seconds, servers on other hosts send the launcher's host the lines that their host's processes wrote to
`observed/`.

The server is a separate process, so that its traffic delays neither training nor generation.

    POST /stage       bring a folder to this host; see `asyncrl.staging.client`
    GET  /manifest    ?folder=v7                           the manifest of a folder of this host
    GET  /file        ?folder=v7&name=model.safetensors    one of its files, or a range of its bytes
    GET  /delta       ...&base=v5&sum=5f1d3c2a90b1e6d4     its delta to v5, in which it had this checksum
    POST /same_code   compare the code of another host with that of this one
    POST /observed    append lines of another host's `observed/`; on the launcher's host
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from asyncrl.comm import names
from asyncrl.comm.http_client import PIECE_BYTES, HttpError, JsonHttp
from asyncrl.comm.http_server import Handler, HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.name_resolve import NameResolveError
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.typed import decode_json
from asyncrl.config.plugin_code.same_code import KnownSources
from asyncrl.config.run_dir import STAGED_DIR
from asyncrl.observe import observer
from asyncrl.runtime.process.worker import AsyncWorker
from asyncrl.staging.client import (
    HOLD_S,
    LAUNCHER_HOST,
    OBSERVED_LIMIT_S,
    SOURCE_FAILED,
    ObservedReply,
    ObservedRequest,
    SameCodeReply,
    SameCodeRequest,
    StageReply,
    StageRequest,
    StagingClient,
    is_folder,
)
from asyncrl.staging.fetch import SourceFailed
from asyncrl.staging.forwarding import HostClock, ObservedHome, ObservedLines
from asyncrl.staging.store import Copy, Store
from asyncrl.weights.manifest import ManifestError

T = TypeVar("T")

_MAX_SUMS_BYTES: Final = 4 << 20
"""Limit of a request with checksums: those of about fifty thousand modules."""
MAX_OBSERVED_BYTES: Final = 4 << 20
"""Limit of a request with lines of `observed/`."""
OBSERVED_EVERY_S: Final = 2.0
_LAST_SEND_S: Final = 1.0
"""Limit of the last attempt to send lines, after a stop was requested."""


class StagingService:
    """Serves a store over HTTP, in one running loop.

    Args:
        root, on_launch_folder: see `Store`.
        security: the run's token and certificate; None if the run has no secret.
        home: receives the lines of other hosts' processes; None on other hosts than the launcher's.
        deltas: see `Store`.
    """

    def __init__(
        self,
        root: Path,
        security: HttpSecurity | None,
        on_launch_folder: Callable[[str, Path], None],
        home: ObservedHome | None = None,
        *,
        deltas: bool = True,
    ) -> None:
        token, tls = (None, None) if security is None else (security.token, security.server_context())
        self._peers = JsonHttp(security)
        self._home = home
        self._sources = KnownSources()
        self.store = Store(root, self._peers, on_launch_folder, deltas=deltas)
        routes = {
            "/stage": HttpRoute(self._stage, "POST"),
            "/manifest": HttpRoute(_of_copy(self._manifest, self.store), "GET"),
            "/file": HttpRoute(_of_copy(self._file, self.store), "GET"),
            "/delta": HttpRoute(_of_copy(self._delta, self.store), "GET"),
            "/same_code": HttpRoute(self._same_code, "POST", _MAX_SUMS_BYTES),
            "/observed": HttpRoute(self._observed, "POST", MAX_OBSERVED_BYTES),
        }
        self.http = HttpServer(routes, token=token, tls=tls)

    async def close(self) -> None:
        """Stop serving and fetching."""
        await self.store.close()
        await self.http.close()
        await self._peers.close()

    async def _stage(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        order = _decoded(body, StageRequest)
        if not is_folder(order.folder) or not all(map(is_folder, order.keep)):
            raise Refused(400, {"error": f"no name of a folder: {(order.folder, *order.keep)}"}, "malformed")
        coming = self.store.stage(order)
        await asyncio.wait({coming}, timeout=HOLD_S)
        if not coming.done():
            return json_response(StageReply(done=False))
        try:
            copy = coming.result()
        except SourceFailed as error:
            raise Refused(SOURCE_FAILED, {"error": str(error)}, "source_failed") from error
        except OSError as error:
            reason = f"{self.store.place_of(order.folder)}: {error.strerror or error}"
            raise Refused(500, {"error": reason}, "not_staged") from error
        except ManifestError as error:
            raise Refused(500, {"error": str(error)}, "not_staged") from error
        return json_response(StageReply(done=True, path=str(copy.path), manifest_sum=copy.manifest_sum))

    async def _manifest(self, request: web.BaseRequest, copy: Copy) -> web.StreamResponse:
        return web.Response(body=copy.manifest)

    async def _file(self, request: web.BaseRequest, copy: Copy) -> web.StreamResponse:
        name = request.query.get("name", "")
        if name not in copy.files:
            raise Refused(404, {"error": f"the folder has no file {name[:200]!r}"}, "unknown_folder")
        return await _sent(request, copy.path / name)

    async def _delta(self, request: web.BaseRequest, copy: Copy) -> web.StreamResponse:
        folder, name, base, wanted = (request.query.get(key, "") for key in ("folder", "name", "base", "sum"))
        path = await self.store.delta(folder, name, base, wanted)
        if path is None:
            raise Refused(404, {"error": f"no delta of {name[:200]!r} from {base[:200]!r}"}, "no_delta")
        return await _sent(request, path)

    async def _same_code(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        asked = _decoded(body, SameCodeRequest)
        return json_response(SameCodeReply(await asyncio.to_thread(self._sources.differences, asked.sums)))

    async def _observed(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        sent = _decoded(body, ObservedRequest)
        at = time.time()
        if self._home is None:
            raise Refused(404, {"error": "the run's folder is on another host"}, "not_home")
        try:
            await asyncio.to_thread(self._home.append, sent)
        except ValueError as error:
            raise Refused(400, {"error": str(error)}, "malformed") from error
        except OSError as error:
            raise Refused(507, {"error": f"observed/: {error.strerror or error}"}, "not_written") from error
        return json_response(ObservedReply(at, self._home.id))


async def _sent(request: web.BaseRequest, path: Path) -> web.StreamResponse:
    """Answer with the file, or with the range of its bytes that the request asks for."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            asked = request.http_range
        except ValueError as error:
            raise Refused(400, {"error": str(error)}, "malformed") from error
        begin, end, _ = asked.indices(size)
        partial = asked != slice(None, None, 1)
        response = web.StreamResponse(status=206 if partial else 200)
        if partial:
            response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        response.content_length = left = max(0, end - begin)
        file.seek(begin)
        await response.prepare(request)
        while left and (piece := await asyncio.to_thread(file.read, min(left, PIECE_BYTES))):
            left -= len(piece)
            await response.write(piece)
    await response.write_eof()
    return response


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decode_json(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, {"error": str(error)}, "malformed") from error


def _of_copy(handler: Callable[[web.BaseRequest, Copy], Awaitable[web.StreamResponse]], store: Store) -> Handler:
    """Wrap `handler` so that it gets a folder of the store, which is not removed while the handler answers."""

    async def answer(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        folder = request.query.get("folder", "")
        copy = store.get(folder)
        if copy is None:
            raise Refused(404, {"error": f"there is no folder {folder[:200]!r} here"}, "unknown_folder")
        with store.reading(folder):
            return await handler(request, copy)

    return answer


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
    sent = ObservedRequest()
    if ahead_s is not None and not lines.are_home:
        sent = await asyncio.to_thread(lines.take, MAX_OBSERVED_BYTES // 4, ahead_s)
    asked_at = time.time()
    reply = await home.observed(sent)
    clock.exchanged(asked_at, reply.at, time.time())
    lines.home = reply.home
    lines.arrived(sent)
