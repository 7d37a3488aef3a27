"""HTTP server of the GserverManager and the embedded engine: routes, token, TLS, and limits on the cost of a caller.

A caller without the run's token is refused with 401 after the header. If a request is refused before its whole body was
read, the connection is closed and no more of it is read. A caller with the token may still be faulty, so its cost is
bounded. The body has a limit per route, enforced while it is read. The handshake, the header and the body have a time
limit each. Compressed bodies are not unpacked. Refused requests are counted by reason, shown under `/metrics`, and
logged once per address.

aiohttp's low-level server is used without its router and middleware, which cost a fifth of the time at thousands of
calls per second on one core.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.comm.names import url_host
from asyncrl.comm.security import SourceLog

HEADER_LIMIT_S: Final = 15.0
"""For a connection's encryption, and from then or its last answer to the next request's header. Clients close
idle connections after `asyncrl.comm.http_client.KEEP_ALIVE_S`.
"""
BODY_LIMIT_S: Final = 60.0
"""For a body: the largest one at 10 Mbit/s."""
_SHUTDOWN_S: Final = 1.0
"""For running requests to end with the server, and for a peer to confirm the end of an encrypted connection."""

Body: TypeAlias = bytes
Handler: TypeAlias = Callable[[web.BaseRequest, Body], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """Handler of a path.

    Attributes:
        handler: takes the request and its body.
        method: the HTTP method; empty: any.
        max_bytes: limit of the body.
        open: True if it also answers without the token.
    """

    handler: Handler
    method: str = ""
    max_bytes: int = 1 << 16
    open: bool = False


class Refused(Exception):
    """Raised for a request that is not served: the answer's status and body, and the reason under which it is
    counted.
    """

    def __init__(self, status: int, body: Any, reason: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body, self.reason = status, body, reason


class HttpServer:
    """Serves `routes`, by path. A handler raises `Refused` to refuse a request.

    Args:
        token: bearer token of every route that is not open; None if there is none.
        tls: TLS context of an https server; None: http.
        registry: gets the counter of refusals.
    """

    def __init__(
        self,
        routes: Mapping[str, HttpRoute],
        *,
        token: str | None,
        tls: ssl.SSLContext | None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Refused requests by reason; `unauthorized` are those without the token."""
        self._routes = dict(routes)
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._tls = tls
        self._log = SourceLog("call")
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None
        if registry is not None:
            registry.register(_RefusalCollector(self.refused))

    async def start(self, host: str, port: int = 0) -> str:
        """Listen; returns the URL. Port 0 takes a free one."""
        self._runner = await careful_runner(self._handle)
        answering = self._runner.server
        assert answering is not None, "set up"
        handshake_s, goodbye_s = (None, None) if self._tls is None else (HEADER_LIMIT_S, _SHUTDOWN_S)
        self._server = await asyncio.get_running_loop().create_server(  # aiohttp's TCPSite allows a handshake a minute
            answering, host, port, ssl=self._tls, ssl_handshake_timeout=handshake_s, ssl_shutdown_timeout=goodbye_s
        )
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{url_host(host)}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening; held calls end."""
        if self._server is not None and self._runner is not None:
            self._server.close()
            await self._runner.cleanup()
            self._server = self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            route = self._routes.get(request.path)
            if self._expected is not None and not (route is not None and route.open):
                header = request.headers.get("Authorization", "")  # bytes that are not UTF-8 are lone surrogates
                if not hmac.compare_digest(header.encode(errors="surrogateescape"), self._expected):
                    raise Refused(401, {"error": "missing or wrong bearer token"}, "unauthorized")
            if route is None:
                raise Refused(404, {"error": f"no such path: {request.path[:200]}"}, "unknown_path")
            if route.method and request.method != route.method:
                raise Refused(405, {"error": f"{request.path} takes {route.method}"}, "unknown_path")
            return await route.handler(request, await read_body(request, route.max_bytes))
        except Refused as refused:
            self.refused[refused.reason] += 1
            self._log.note(request.remote or "?", f"{refused.reason}, answered {refused}")
            return refusal(request, json_response(refused.body, refused.status))


async def careful_runner(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> web.ServerRunner:
    """Return a runner that serves `handle` within the limits of this module. A client that disconnects cancels its
    request.
    """
    server = web.Server(
        handle,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=HEADER_LIMIT_S,
        lingering_time=0,  # the rest of a refused body is not read
        auto_decompress=False,
    )
    runner = web.ServerRunner(server, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    return runner


class _RefusalCollector(Collector):
    def __init__(self, refused: Mapping[str, int]) -> None:
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """Yield the counter of refusals, by reason."""
        metric = CounterMetricFamily("asyncrl_http_refused", "HTTP requests refused, by reason.", labels=["reason"])
        for reason, count in self._refused.items():
            metric.add_metric([reason], count)
        yield metric


def json_response(body: Any, status: int = 200) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, headers={"Content-Type": "application/json"})


def refusal(request: web.BaseRequest, answer: web.Response) -> web.Response:
    """Return `answer`; the connection is closed after it if the body of `request` has not been read whole."""
    if not request.content.is_eof():
        answer.force_close()
    return answer


async def read_body(request: web.BaseRequest, limit: int) -> Body:
    """Read and return the request's body.

    Raises:
        Refused: the body is larger than `limit`, which is checked while reading, or does not arrive in time.
    """
    content = request.content
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if content.is_eof():  # the body came with the header, as in most calls
        body: bytes = content.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        return body
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            while chunk := await content.readany():
                if len(received) + len(chunk) > limit:
                    raise _too_large(limit)
                received += chunk
    except TimeoutError:
        raise Refused(408, {"error": f"the body did not come within {BODY_LIMIT_S:g} s"}, "too_slow") from None
    except web.RequestPayloadError as error:
        raise Refused(400, {"error": f"the body is broken: {error}"}, "malformed") from error
    return bytes(received)


def _too_large(limit: int) -> Refused:
    return Refused(413, {"error": f"the body has more than {limit} bytes"}, "too_large")
