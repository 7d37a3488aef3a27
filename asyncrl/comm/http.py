"""JSON over HTTP with a bearer token, a time limit on every call and typed failures: what all HTTP clients here build
on."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import orjson

KEEP_ALIVE_S = 4.0
"""An idle connection is closed before the server does it, which would break the next call; uvicorn does after 5 s."""
CONNECT_TIMEOUT_S = 5.0
"""A peer on the same network that does not accept a connection within this is not there."""


class HttpError(Exception):
    """Base of what can go wrong; the message names the URL."""


class HttpUnreachable(HttpError):
    """No connection, or it broke before the whole reply was there: the peer may or may not have acted."""


class HttpTimeout(HttpError):
    """No whole reply in time: the peer may or may not have acted."""


class HttpRefused(HttpError):
    """The peer answered with another status than 2xx; `status` and the beginning of its `body` say why."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        super().__init__(f"{url} answered {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body


class JsonHttp:
    """A pool of connections that all calls of one client share. Make it and close it in the loop that uses it.

    Args:
        token: bearer token; None where the run has no secret.
    """

    def __init__(self, token: str | None) -> None:
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, url: str, body: Any = None, *, timeout_s: float) -> Any:
        """Send `body` as JSON (none: no body) and return the reply, parsed if it is JSON, else None.

        Raises:
            HttpUnreachable, HttpTimeout, HttpRefused: see there.
        """
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            async with self._open().request(method, url, data=data, timeout=timeout) as reply:
                content = await reply.read()
        except TimeoutError as error:
            raise HttpTimeout(f"{url} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise HttpUnreachable(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        if not 200 <= reply.status < 300:
            raise HttpRefused(url, reply.status, content)
        if reply.content_type != "application/json" or not content:
            return None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise HttpRefused(url, reply.status, content) from error

    async def close(self) -> None:
        """Close every connection; calls under way fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Unlimited: bounded by what its user sends at the same time.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session
