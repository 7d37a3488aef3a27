"""StagingServer: one on each host with generation servers or RolloutWorkers, where hosts share no folder.

It has the initial model and the versions of the actor for servers, and what RolloutWorkers read from files: each
fetched once for all processes of its host, and given to other hosts. The GserverManager says what is fetched from whom
(`asyncrl.manager.fleet.fan_out`). That on the launcher's host also says whether another host has the same code.

    POST /stage       have a folder here; see `asyncrl.weights.staging.messages`
    GET  /manifest    ?folder=v7                           of a folder that is here
    GET  /file        ?folder=v7&name=model.safetensors    one of its files
    POST /same_code   compare the code of another host with that of this one

It is a process of its own, so that what it sends delays neither training nor generation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from asyncrl.comm import names
from asyncrl.comm.http.calls import PIECE_BYTES, JsonHttp
from asyncrl.comm.http.server import Handler, HttpServer, Refused, Route, json_response
from asyncrl.comm.security import HttpSecurity
from asyncrl.config.run_dir import STAGED_DIR
from asyncrl.config.same_code import KnownSources
from asyncrl.runtime.process.worker import AsyncWorker
from asyncrl.weights.staging.client import HOLD_S, SOURCE_FAILED
from asyncrl.weights.staging.fetch import SourceFailed
from asyncrl.weights.staging.messages import SameCodeReply, SameCodeRequest, StageReply, StageRequest, is_folder
from asyncrl.weights.staging.store import Copy, Store
from asyncrl.weights.versions.manifest import ManifestError

T = TypeVar("T")

_MAX_SUMS_BYTES: Final = 4 << 20
"""Checksums of some fifty thousand modules."""


class StagingServer(AsyncWorker):
    """Process that stages model folders and input files on its host."""

    always_reports = True

    async def main(self) -> None:
        """Serve until a stop is requested."""
        # its own by number: "hosts" of one machine, or with one disk in spite of all, do not remove each other's
        folder = self.run_dir / STAGED_DIR / str(self.index)
        service = StagingService(folder, self.http_security, self._has)
        lease_s = self.config.system.lease_s
        try:
            url = await service.http.start(self.config.system.host)
            self.resolver.add(names.staging_server_key(self.index), url, lease_s=lease_s, replace=True)
            self.ready()
            await self.stop.wait()
        finally:
            await service.close()

    def _has(self, name: str, path: Path) -> None:
        """Let those of this host begin that wait for a folder of the launch."""
        key, lease_s = names.staged_key(name, self.config.system.host), self.config.system.lease_s
        self.resolver.add(key, str(path), lease_s=lease_s, replace=True)
        self.log.info("%s is at %s", name, path)


class StagingService:
    """A store behind HTTP, for one running loop.

    Args:
        root, on_launch_folder: see `Store`.
        security: the run's token and certificate; None where it has no secret.
    """

    def __init__(
        self, root: Path, security: HttpSecurity | None, on_launch_folder: Callable[[str, Path], None]
    ) -> None:
        token, tls = (None, None) if security is None else (security.token, security.server_context())
        self._peers = JsonHttp(security)
        self._sources = KnownSources()
        self.store = Store(root, self._peers, on_launch_folder)
        routes = {
            "/stage": Route(self._stage, "POST"),
            "/manifest": Route(_of_copy(self._manifest, self.store), "GET"),
            "/file": Route(_of_copy(self._file, self.store), "GET"),
            "/same_code": Route(self._same_code, "POST", _MAX_SUMS_BYTES),
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
            told = f"{self.store.place_of(order.folder)}: {error.strerror or error}"
            raise Refused(500, {"error": told}, "not_staged") from error
        except ManifestError as error:
            raise Refused(500, {"error": str(error)}, "not_staged") from error
        return json_response(StageReply(done=True, path=str(copy.path), manifest_sum=copy.manifest_sum))

    async def _manifest(self, request: web.BaseRequest, copy: Copy) -> web.StreamResponse:
        return web.Response(body=copy.manifest)

    async def _file(self, request: web.BaseRequest, copy: Copy) -> web.StreamResponse:
        name = request.query.get("name", "")
        if name not in copy.files:
            raise Refused(404, {"error": f"the folder has no file {name[:200]!r}"}, "unknown_folder")
        response = web.StreamResponse()
        with (copy.path / name).open("rb", buffering=0) as file:
            response.content_length = os.fstat(file.fileno()).st_size
            await response.prepare(request)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                await response.write(piece)
        await response.write_eof()
        return response

    async def _same_code(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        asked = _decoded(body, SameCodeRequest)
        return json_response(SameCodeReply(await asyncio.to_thread(self._sources.differences, asked.sums)))


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, {"error": str(error)}, "malformed") from error


def _of_copy(handler: Callable[[web.BaseRequest, Copy], Awaitable[web.StreamResponse]], store: Store) -> Handler:
    """`handler`, for a folder that is here, and stays here for as long as it answers."""

    async def answer(request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        folder = request.query.get("folder", "")
        copy = store.get(folder)
        if copy is None:
            raise Refused(404, {"error": f"there is no folder {folder[:200]!r} here"}, "unknown_folder")
        with store.reading(folder):
            return await handler(request, copy)

    return answer
