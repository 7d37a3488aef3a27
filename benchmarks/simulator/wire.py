"""Calls between the parts of a simulated run, like those of `asyncrl.comm.http_client.JsonHttp`, without sockets.

A host is an object that answers under a URL. A call takes `latency_s` in each direction (both at its start, to save a
timer), keeps its time limit, and fails as over HTTP: an unknown host gives `HttpUnreachable`, silence `HttpTimeout`,
and a refused request `HttpRefused`. With `encode` every message is written as JSON and read again, as on the wire,
which is slower but exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from asyncrl.comm.http_client import HttpRefused, HttpTimeout, HttpUnreachable, JsonHttp, decoded_reply
from asyncrl.comm.typed import decode_json
from asyncrl.manager.messages import BadRequest, Verb

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


class Network:
    """Hosts by URL; `latency_s` is the time of one direction."""

    def __init__(self, latency_s: float = 0.0002, *, encode: bool = False) -> None:
        self.hosts: dict[str, Host] = {}
        self.latency_s, self.encode = latency_s, encode


class VirtualHttp(JsonHttp):
    """A `JsonHttp` of this network."""

    def __init__(self, network: Network) -> None:
        super().__init__(None)
        self._network = network

    async def call(self, method: str, url: str, body: Any = None, *, timeout_s: float, reply: Any = None) -> Any:
        """See `JsonHttp`."""
        network = self._network
        base, slash, path = url.partition("/")[2].lstrip("/").partition("/")
        if network.encode and body is not None:
            body = decode_json(msgspec.json.encode(body), type(body))
        try:
            async with asyncio.timeout(min(timeout_s, LONGEST_S)):
                await asyncio.sleep(2 * network.latency_s)  # both directions with one timer
                host = network.hosts.get(f"http://{base}")
                if host is None:
                    raise ConnectionRefusedError("nothing listens there")
                answer = await host.answer(slash + path, body)
        except TimeoutError as error:
            raise HttpTimeout(f"{url} did not answer within {timeout_s:g} s") from error
        except ConnectionError as error:
            raise HttpUnreachable(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
        except BadRequest as error:
            raise HttpRefused(url, 400, str(error).encode()) from error
        return decoded_reply(url, 200, msgspec.json.encode(answer), reply) if network.encode else answer

    async def pieces(
        self, url: str, *, silence_s: float, begin: int = 0, end: int | None = None
    ) -> AsyncGenerator[bytes]:
        """See `JsonHttp`: no host here tells anything piece by piece, as a server's figures are."""
        raise HttpUnreachable(f"{url} is not simulated")
        yield b""

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class VerbsHost:
    """A host that answers verbs, like the manager."""

    def __init__(self, verbs: dict[str, Verb]) -> None:
        self._verbs = verbs

    async def answer(self, path: str, body: Any) -> Any:
        """See `Host`."""
        kind, handler = self._verbs[path]
        assert isinstance(body, kind), f"{path} takes a {kind.__name__}, not a {type(body).__name__}"
        return await handler(body)
