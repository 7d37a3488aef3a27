"""Calls between the parts of a simulated run, like those of `asyncrl.comm.http_client.JsonHttp`, without sockets.

A host is an object that answers under a URL. A call takes `LATENCY_S` in each direction (both at its start, to save a
timer), keeps its time limit, and fails as over HTTP: an unknown host gives `HttpUnreachable`, silence `HttpTimeout`,
and a refused request `HttpRefused`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Protocol, TypeAlias

from asyncrl.comm.http_client import HttpRefused, HttpTimeout, HttpUnreachable, JsonHttp
from asyncrl.manager.messages import BadRequest, Method

LATENCY_S = 0.0002
LONGEST_S = 3600.0
"""Limit of a call whose caller has one of its own: a call that nobody ends is found."""


class Host(Protocol):
    """A host that answers under a URL."""

    async def answer(self, path: str, body: Any) -> Any:
        """Return the reply to a call.

        Raises:
            ConnectionError: the connection broke.
            BadRequest: the request is refused.
        """
        ...


Network: TypeAlias = dict[str, Host]
"""Hosts by URL."""


class VirtualHttp(JsonHttp):
    """A `JsonHttp` of this network."""

    def __init__(self, network: Network) -> None:
        super().__init__(None)
        self._network = network

    async def call(self, method: str, url: str, body: Any = None, *, timeout_s: float, reply: Any = None) -> Any:
        """See `JsonHttp`."""
        base, slash, path = url.partition("/")[2].lstrip("/").partition("/")
        try:
            async with asyncio.timeout(min(timeout_s, LONGEST_S)):
                await asyncio.sleep(2 * LATENCY_S)  # both directions with one timer
                host = self._network.get(f"http://{base}")
                if host is None:
                    raise ConnectionRefusedError("nothing listens there")
                return await host.answer(slash + path, body)
        except TimeoutError as error:
            raise HttpTimeout(f"{url} did not answer within {timeout_s:g} s") from error
        except ConnectionError as error:
            raise HttpUnreachable(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        except BadRequest as error:
            raise HttpRefused(url, 400, str(error).encode()) from error

    async def pieces(
        self, url: str, *, silence_s: float, begin: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """See `JsonHttp`: no host here tells anything piece by piece, as a server's figures are."""
        raise HttpUnreachable(f"{url} is not simulated")
        yield b""

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class MethodsHost:
    """A host that answers methods, like the manager."""

    def __init__(self, methods: dict[str, Method]) -> None:
        self._methods = methods

    async def answer(self, path: str, body: Any) -> Any:
        """See `Host`."""
        kind, handler = self._methods[path]
        assert isinstance(body, kind), f"{path} takes a {kind.__name__}, not a {type(body).__name__}"
        return await handler(body)
