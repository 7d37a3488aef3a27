"""A host's staged folders over HTTP.

POST /stage       bring a folder to this host; see `asyncrl.staging.messages`
GET  /manifest    ?folder=v7                           the manifest of a folder of this host
GET  /file        ?folder=v7&name=model.safetensors    one of its files, or a range of its bytes
GET  /delta       ...&base=v5&sum=5f1d3c2a90b1e6d4     its delta to v5, in which it had this checksum
POST /same_code   compare the code of another host with that of this one
POST /observed    append lines of another host's `observed/`; on the launcher's host
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from asyncrl.comm.http.calls import PIECE_BYTES, JsonHttp
from asyncrl.comm.http.server import Handler, HttpRoute, HttpServer, Refused, json_response
from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.typed import decode_json
from asyncrl.config.plugin_code.same_code import KnownSources
from asyncrl.models.weights.versions.manifest import ManifestError
from asyncrl.staging.client import HOLD_S, SOURCE_FAILED
from asyncrl.staging.fetch import SourceFailed
from asyncrl.staging.forwarding import Batch, ObservedHome
from asyncrl.staging.messages import (
    ObservedReply,
    ObservedRequest,
    SameCodeReply,
    SameCodeRequest,
    StageReply,
    StageRequest,
    is_folder,
)
from asyncrl.staging.store import Copy, Store

T = TypeVar("T")

_MAX_SUMS_BYTES: Final = 4 << 20
"""Limit of a request with checksums: those of about fifty thousand modules."""
MAX_OBSERVED_BYTES: Final = 4 << 20
"""Limit of a request with lines of `observed/`."""


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
            batch = Batch(sent.sender, sent.first, sent.lines)
            await asyncio.to_thread(self._home.append, batch, sent.ahead_s)
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
