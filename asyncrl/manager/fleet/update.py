"""One weight update of one generation server: pause, load, continue, check; and one rest, in which it releases its
memory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence

from asyncrl.comm.http.calls import HttpError, HttpTimeout, JsonHttp
from asyncrl.inference.client import DamagedVersion, GenerationServerClient, MemoryTag, PauseMode, PictureSender
from asyncrl.manager.fleet.servers import BeginUpdate, Rest, Target
from asyncrl.models.weights.transports.base import ManagerEnd
from asyncrl.trainer.messages import SendWeights

UpdateCheck = Callable[[int, GenerationServerClient, Target], Awaitable[None]]
"""Checks that the server with this index has the target's weights. Raises `HttpError` if it has others."""


class ServerUpdater:
    """Makes the calls of one order to one server. Different servers' orders may run at the same time.

    Args:
        http: connections to the servers.
        transport: brings weights to the servers.
        timeout_s: limit of silence. The caller ends an update or a rest without a sign of life, so their calls have no
            limit.
        checks: checks that a server must pass after each update.
        own_api: see `asyncrl.inference.settings.Backend`.
    """

    def __init__(
        self,
        http: JsonHttp,
        transport: ManagerEnd,
        *,
        timeout_s: float,
        checks: Sequence[UpdateCheck] = (),
        own_api: bool = True,
    ) -> None:
        self._own_api, self._http, self._sender = own_api, http, PictureSender(http, inline=not own_api)
        self._transport, self._timeout_s, self._checks = transport, timeout_s, checks

    async def update(
        self,
        order: BeginUpdate,
        resumed: Callable[[Collection[MemoryTag]], None] = lambda _: None,
        sending: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring the server to the order's target, then let it generate again.

        A rested server is already paused. It allocates the memory of its weights first, and the rest only after the
        update, since reading the weights may need memory. `resumed` is called with the kinds that are allocated,
        `sending` from time to time while the trainer sends weights.

        Running requests are answered or kept, according to the order. New ones wait until the server has its weights.
        If a step or a check fails the server stays paused: its weights are unknown, so it must not generate. A server
        that refuses damaged files continues with the weights that it had (`order.had`).

        A server whose requests were kept answers a check only after those in its queue. So it is checked by `check`,
        while it serves already. Otherwise its version, and with it the gate, would wait for the queue.

        Raises:
            DamagedVersion: the server continues with the version that it had.
            HttpError: a step or a check failed.
        """
        client = self._client(order.url)
        if not order.rested:
            await self._pause(order, client)
        await self._resume_memory(order.released & {MemoryTag.weights}, client, resumed)
        await self._load(order, client, sending)
        await self._resume_memory(order.released - {MemoryTag.weights}, client, resumed)
        await client.resume()
        if not order.keeps_requests:
            await self._check_or_pause(order, client)  # after `resume`, since a paused server answers nothing

    async def check(self, order: BeginUpdate) -> None:
        """Check a server that has the order's target.

        Raises:
            HttpTimeout: it was not checked within the limit of silence: it serves, so its requests come first.
            HttpError: a check failed.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._run_checks(order, self._client(order.url))
        except TimeoutError as error:
            raise HttpTimeout(f"{order.url} did not answer within {self._timeout_s:g} s") from error

    async def pause(self, url: str) -> None:
        """Pause the server with its requests, so that it returns no token of its present weights.

        Raises:
            HttpError: the call failed.
        """
        await self._client(url).pause(PauseMode.retract, timeout_s=self._timeout_s)

    async def rest(self, order: Rest) -> None:
        """Have the server answer running requests with their tokens so far, and release its memory. It stays paused.

        Raises:
            HttpError: a call failed; the state of its memory is unknown.
        """
        client = self._client(order.url)
        await client.pause(PauseMode.abort, timeout_s=math.inf)
        await client.release_memory([*MemoryTag], timeout_s=math.inf)

    def _client(self, url: str) -> GenerationServerClient:
        return GenerationServerClient(self._http, url, self._sender)

    async def _pause(self, order: BeginUpdate, client: GenerationServerClient) -> None:
        if order.frozen:  # SGLang aborts frozen requests only once it runs again, but queued ones at once
            await client.pause(PauseMode.retract, timeout_s=math.inf)
        elif order.pause == PauseMode.abort and not self._own_api and await client.end_running():
            # SGLang's pause with `abort` looks once a second whether requests have ended.
            await client.pause(PauseMode.retract, timeout_s=math.inf)
            await client.abort_all()  # requests that came since, which wait in the queue
            return
        await client.pause(order.pause, timeout_s=math.inf)

    async def _resume_memory(
        self,
        tags: Collection[MemoryTag],
        client: GenerationServerClient,
        resumed: Callable[[Collection[MemoryTag]], None],
    ) -> None:
        if tags:
            await client.resume_memory(sorted(tags), timeout_s=math.inf)
            resumed(tags)

    async def _load(self, order: BeginUpdate, client: GenerationServerClient, sending: Callable[[], None]) -> None:
        """Have the server load the order's version. If it refuses damaged files, it continues with its own weights."""
        wanted = SendWeights(order.server, client.url, order.target.version, order.keeps_cache, self._timeout_s)
        try:
            await self._transport.bring(client, wanted, order.target.read_at, sending)
        except DamagedVersion:
            if order.had is not None:
                await client.resume()
            raise

    async def _check_or_pause(self, order: BeginUpdate, client: GenerationServerClient) -> None:
        try:
            await self._run_checks(order, client)
        except HttpError:
            await client.pause(PauseMode.retract, timeout_s=math.inf)  # it returns no token of these weights
            raise

    async def _run_checks(self, order: BeginUpdate, client: GenerationServerClient) -> None:
        for check in self._checks:
            await check(order.server, client, order.target)
