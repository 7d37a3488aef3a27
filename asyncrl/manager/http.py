"""HTTP around `ManagerService`: JSON in and out, bearer token, one small handler for everything.

aiohttp's low-level server is used without its router and middleware: at thousands of calls per second on one core
they cost a fifth.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from asyncrl.manager.service import BadRequest, ManagerService

MAX_BODY_BYTES = 16 * 2**20
"""A call for ten thousand requests is under two megabytes; more than this is not one of this system's."""

_JSON = {"Content-Type": "application/json"}
_OPEN = frozenset({"/health", "/metrics"})

Json = dict[str, Any]

_log = logging.getLogger(__name__)


class ManagerHttp:
    """The server. `status` gives the reply of `/status`.

    A call without the run's token is refused with 401 and counted; each address is logged once.
    """

    def __init__(
        self, service: ManagerService, *, token: str | None, registry: CollectorRegistry, status: Callable[[], Json]
    ) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._registry = registry
        self._held: dict[str, Callable[[Json], Awaitable[Json]]] = {
            "/allocate_rollout": service.allocate_rollout,
            "/schedule_request": service.schedule_request,
            "/wait_expiring": service.wait_expiring,
            "/lost_servers": service.lost_servers,
        }
        self._quick: dict[str, Callable[[Json], Json]] = {
            "/finish_rollout": service.finish_rollout,
            "/report_consumed": service.report_consumed,
            "/close_gate": service.close_gate,
            "/abandon": service.abandon,
        }
        self._views: dict[str, Callable[[], Json]] = {"/books": service.books, "/status": status}
        self._runner: web.ServerRunner | None = None
        self._refused_from: set[str] = set()
        self.unauthorized = 0

    async def start(self, host: str, port: int = 0) -> str:
        """Listen; returns the URL. Port 0 takes a free one."""
        server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(server, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        address = self._runner.addresses[0]
        return f"http://{host}:{address[1]}"

    async def close(self) -> None:
        """Stop listening; calls that are held end."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path in _OPEN:
            return self._open(path)
        if self._expected is not None and not self._authorized(request):
            return _error(401, "missing or wrong bearer token")
        try:
            if path in self._views:
                return _reply(self._views[path]())
            held, quick = self._held.get(path), self._quick.get(path)
            if held is None and quick is None:
                return _error(404, f"no such path: {path}")
            if (request.content_length or 0) > MAX_BODY_BYTES:
                return _error(413, f"body has {request.content_length} bytes; at most {MAX_BODY_BYTES} are taken")
            body = orjson.loads(await request.read())
            if not isinstance(body, dict):
                raise BadRequest("the body is not a JSON object")
            if held is not None:
                return _reply(await held(body))
            assert quick is not None
            return _reply(quick(body))
        except (BadRequest, orjson.JSONDecodeError) as error:
            return _error(400, str(error))
        except (KeyError, TypeError, AttributeError) as error:
            _log.warning("%s: malformed request", path, exc_info=error)
            return _error(400, f"field {error} is missing or of the wrong type")

    def _open(self, path: str) -> web.Response:
        if path == "/health":
            return _reply({"status": "ok"})
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _authorized(self, request: web.BaseRequest) -> bool:
        assert self._expected is not None
        header = request.headers.get("Authorization", "")
        if hmac.compare_digest(header.encode(errors="replace"), self._expected):
            return True
        self.unauthorized += 1
        source = request.remote or "?"
        if source not in self._refused_from:
            self._refused_from.add(source)
            _log.warning("refused a call from %s without this run's token; further ones are only counted", source)
        return False


def _reply(content: Json) -> web.Response:
    return web.Response(body=orjson.dumps(content), headers=_JSON)


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=orjson.dumps({"error": message}), headers=_JSON)
