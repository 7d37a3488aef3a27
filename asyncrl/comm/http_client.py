"""JSON over HTTP, with a time limit on every call and typed failures: the base of all HTTP clients here.

If the run has a secret, the client first verifies by TLS that the server belongs to the run, and only then sends the
token.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar, overload

import aiohttp
import msgspec
import numpy as np

from asyncrl.comm.security import HttpSecurity
from asyncrl.comm.typed import decode_json
from asyncrl.comm.waits import ANSWER_S

T = TypeVar("T")

_JSON = {"Content-Type": "application/json"}

KEEP_ALIVE_S = 4.0
"""After which idle connections are closed, before the server closes them and breaks the next call;
uvicorn does so after 5 s.
"""


PIECE_BYTES = 1 << 20
"""Largest piece that `JsonHttp.pieces` yields."""
_SHOWN_BYTES = 500


class HttpError(Exception):
    """Base of the failures of a call; the message names the URL."""


class HttpUnreachable(HttpError):
    """The connection could not be made, or broke before the whole reply arrived: the peer may or may not have acted."""


class HttpTimeout(HttpError):
    """No connection, or not the whole reply, within a time limit: the peer may or may not have acted."""


class HttpRefused(HttpError):
    """The peer did not answer with a 2xx status; see `status`, the beginning of its `body`, and its `headers`."""

    def __init__(self, url: str, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{url} answered {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body
        self.headers = headers or {}


class HttpMalformed(HttpRefused):
    """The peer answered with a 2xx status but an unexpected body. The message names the wrong field."""

    def __init__(self, url: str, status: int, body: bytes, why: str) -> None:
        super().__init__(url, status, body)
        self.args = (f"{self}, which is not as expected: {why}",)


class JsonHttp:
    """A pool of connections that all calls of one client share. Create and close it in the event loop that uses it.

    Args:
        security: the run's token and certificate; None if it has no secret, and for servers outside the run.
        key: a bearer token for servers outside the run, which are verified by their own certificates.
        proxies: use the proxies that the environment names (`HTTP_PROXY`, `NO_PROXY`); only for servers outside the
            run.
    """

    def __init__(self, security: HttpSecurity | None, *, key: str | None = None, proxies: bool = False) -> None:
        self._proxies = proxies
        self._security = security
        self._tls = None if security is None else security.client_context()
        token = key if security is None else security.token
        self._authorization = None if token is None else {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    @overload
    async def call(self, method: str, url: str, body: Any = None, *, timeout_s: float) -> Any: ...

    @overload
    async def call(self, method: str, url: str, body: Any = None, *, timeout_s: float, reply: type[T]) -> T: ...

    async def call(self, method: str, url: str, body: Any = None, *, timeout_s: float, reply: Any = None) -> Any:
        """Send `body` as JSON (None: no body) and return the reply, which must be of the type `reply`.

        Without a type the reply is returned parsed if it is JSON, and None otherwise. With `timeout_s=math.inf` the
        connection has no limit either: the caller knows when to end the call.

        Raises:
            HttpUnreachable: no connection, or it broke before the whole reply had arrived.
            HttpTimeout: the whole reply did not arrive in time.
            HttpRefused: the status is not 2xx.
            HttpMalformed: the body is not of the type `reply`.
        """
        data = None if body is None else _encoder.encode(body)
        limits = aiohttp.ClientTimeout(sock_connect=None if timeout_s == math.inf else min(ANSWER_S, timeout_s))
        tls, headers = self._proofs(url)
        try:
            # Not `ClientTimeout.total`: if the task is cancelled when that passes, aiohttp 3.14 loses the cancellation.
            async with (
                asyncio.timeout(timeout_s),
                self._open().request(
                    method, url, data=data, headers=headers, ssl=tls, timeout=limits, allow_redirects=False
                ) as answer,
            ):
                content = await answer.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise HttpTimeout(f"{url} accepted no connection within {limits.sock_connect:g} s") from error
        except TimeoutError as error:
            raise HttpTimeout(f"{url} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise HttpUnreachable(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        if not 200 <= answer.status < 300:
            raise HttpRefused(url, answer.status, content, answer.headers)
        if reply is None and (answer.content_type != "application/json" or not content):
            return None
        return decoded_reply(url, answer.status, content, reply)

    async def pieces(
        self, url: str, *, silence_s: float, begin: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield the body of `url`, of any length, piece by piece as it arrives. Close the generator if it is not read
        to its end.

        Args:
            begin, end: range of bytes; None: to the last one.

        Raises:
            HttpUnreachable: no connection, or it broke before the whole body had arrived.
            HttpTimeout: nothing arrived for `silence_s`.
            HttpRefused: the status is not 2xx.
        """
        limits = aiohttp.ClientTimeout(sock_connect=min(ANSWER_S, silence_s), sock_read=silence_s)
        tls, proofs = self._proofs(url)
        headers, expected = {**(proofs or {}), "Accept-Encoding": "identity"}, HTTPStatus.OK
        if begin or end is not None:
            headers["Range"], expected = f"bytes={begin}-{'' if end is None else end - 1}", HTTPStatus.PARTIAL_CONTENT
        try:
            async with self._open().get(url, headers=headers, ssl=tls, timeout=limits, allow_redirects=False) as answer:
                if answer.status != expected:
                    raise HttpRefused(url, answer.status, await answer.content.read(_SHOWN_BYTES))
                async for piece in answer.content.iter_chunked(PIECE_BYTES):
                    yield piece
        except aiohttp.ConnectionTimeoutError as error:
            raise HttpTimeout(f"{url} accepted no connection within {limits.sock_connect:g} s") from error
        except TimeoutError as error:
            raise HttpTimeout(f"{url} was silent for {silence_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise HttpUnreachable(f"{url} broke off: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close every connection. Running calls fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _proofs(self, url: str) -> tuple[ssl.SSLContext | bool, Mapping[str, str] | None]:
        """Return the TLS context that verifies the server at `url`, and the headers that prove this process to it."""
        if self._security is None or self._tls is None:
            return True, self._authorization
        if self._security.is_adopted(url):
            return True, None
        if not url.startswith("https://"):
            raise HttpUnreachable(f"{url} is not a server of this run (those use TLS): nothing is sent to it")
        return self._tls, self._authorization

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Unlimited: the user bounds the number of concurrent calls.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=_JSON, trust_env=self._proxies)
        return self._session


def decoded_reply(url: str, status: int, content: bytes, reply: type[T] | None) -> Any:
    """Return the JSON that `url` answered with, decoded as `reply` if a type is given.

    Raises:
        HttpMalformed: it is not JSON, or not of that type.
    """
    try:
        return decode_json(content, Any if reply is None else reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpMalformed(url, status, content, str(error)) from error


def _plain(value: object) -> object:
    """Return plain data for `value`: agents may pass token ids as numpy arrays."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}; JSON has no such thing")


_encoder = msgspec.json.Encoder(enc_hook=_plain)
