"""The manager's verbs over HTTP: JSON in and out, bearer token, one small handler for everything.

aiohttp's low-level server is used without its router and middleware: at thousands of calls per second on one core
they cost a fifth.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from asyncrl.comm.authentication import SourceLog
from asyncrl.manager.messages import BadRequest, Message, Verb

MAX_BODY_BYTES = 16 * 2**20
"""A call for ten thousand requests is under two megabytes; more than this is not one of this system's."""

_JSON = {"Content-Type": "application/json"}

_encoder = msgspec.json.Encoder()


class ManagerHttp:
    """The server.

    A call without the run's token is refused with 401 and counted; each address is logged once.

    Args:
        verbs: by path, the type of the request and what answers it.
        token: bearer token of every verb; None where the run has no secret.
        registry: what `/metrics` shows, to anybody.
    """

    def __init__(self, verbs: Mapping[str, Verb], *, token: str | None, registry: CollectorRegistry) -> None:
        self._verbs = {path: (msgspec.json.Decoder(kind), handler) for path, (kind, handler) in verbs.items()}
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._registry = registry
        self._runner: web.ServerRunner | None = None
        self._refusals = SourceLog("call")
        self.unauthorized = 0

    async def start(self, host: str) -> str:
        """Listen at a free port; returns the URL."""
        loop = asyncio.get_running_loop()

        def with_body_limit(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            """aiohttp's own limit is 1 MiB."""
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)

        server = web.Server(self._handle, request_factory=with_body_limit, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(server, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop listening; calls that are held end."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path == "/health":
            return _reply({"status": "ok"})
        if path == "/metrics":
            return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if self._expected is not None and not self._authorized(request):
            return _error(401, "missing or wrong bearer token")
        if (verb := self._verbs.get(path)) is None:
            return _error(404, f"no such path: {path}")
        decoder, handler = verb
        try:
            return _reply(await handler(decoder.decode(await request.read() or b"{}")))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        except msgspec.ValidationError as error:
            return _error(400, _with_path_first(str(error)))
        except (BadRequest, msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(400, str(error))

    def _authorized(self, request: web.BaseRequest) -> bool:
        assert self._expected is not None
        header = request.headers.get("Authorization", "")
        if hmac.compare_digest(header.encode(errors="surrogateescape"), self._expected):
            return True
        self.unauthorized += 1
        self._refusals.note(request.remote or "?", "it does not have this run's token")
        return False


def _reply(content: Message | dict[str, str]) -> web.Response:
    return web.Response(body=_encoder.encode(content), headers=_JSON)


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=_encoder.encode({"error": message}), headers=_JSON)


def _with_path_first(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.order`" as "$.order: expected int, got str"."""
    what, _, path = message.replace("`", "").partition(" - at ")
    return f"{path or '$'}: {what[:1].lower()}{what[1:]}"
