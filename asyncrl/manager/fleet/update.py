"""One weight update of one generation server: pause, load, continue, check; and one rest, in which it releases its
memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from asyncrl.comm.http.calls import HttpError
from asyncrl.inference.client import DamagedVersion, GenerationServerClient, MemoryTag, PauseMode
from asyncrl.manager.fleet.servers import BeginUpdate, Target
from asyncrl.models.weights.transports.base import ManagerEnd
from asyncrl.trainer.messages import SendWeights

UpdateCheck = Callable[[int, GenerationServerClient, Target], Awaitable[None]]
"""Checks the server with this index, which has the target's weights and gets no requests yet. Raises `HttpError` if the
weights are not the target's.
"""


async def update_server(
    order: BeginUpdate,
    client: GenerationServerClient,
    transport: ManagerEnd,
    *,
    timeout_s: float,
    checks: Sequence[UpdateCheck] = (),
    resumed: Callable[[Collection[MemoryTag]], None] = lambda _: None,
) -> None:
    """Bring the server to the order's target, then let it generate again.

    A rested server is paused. It allocates the memory of its weights first, and the rest only after the update: reading
    the weights may need room meanwhile. `resumed` is called with the kinds that are allocated.

    Running requests are answered or kept, as the order says. New ones wait until the server has its weights. If a step
    or a check fails the server stays paused: its weights are unknown, so it must not generate. A server that refuses
    damaged files continues with its own weights, which the order names.

    Raises:
        DamagedVersion: the server continues with the version that it had.
        HttpError: a step or a check failed.
    """
    if not order.rested:
        await _pause(order, client, timeout_s)
    await _resume_memory(order.released & {MemoryTag.weights}, client, resumed, timeout_s)
    await _load(order, client, transport, timeout_s)
    await _resume_memory(order.released - {MemoryTag.weights}, client, resumed, timeout_s)
    await client.resume()
    await _check(order, client, checks, timeout_s)  # after it: a paused server answers nothing


async def rest_server(client: GenerationServerClient, *, timeout_s: float) -> None:
    """Have the server answer running requests with what they have, and release its memory. It stays paused.

    Raises:
        HttpError: a call failed; the state of its memory is unknown.
    """
    await client.pause(PauseMode.abort, timeout_s=timeout_s)
    await client.release_memory([*MemoryTag], timeout_s=timeout_s)


async def _resume_memory(
    tags: Collection[MemoryTag],
    client: GenerationServerClient,
    resumed: Callable[[Collection[MemoryTag]], None],
    timeout_s: float,
) -> None:
    if tags:
        await client.resume_memory(sorted(tags), timeout_s=timeout_s)
        resumed(tags)


async def _pause(order: BeginUpdate, client: GenerationServerClient, timeout_s: float) -> None:
    if order.frozen:  # SGLang aborts frozen requests only once it runs again, but queued ones at once
        await client.pause(PauseMode.retract, timeout_s=timeout_s)
    await client.pause(order.pause, timeout_s=timeout_s)


async def _load(order: BeginUpdate, client: GenerationServerClient, transport: ManagerEnd, timeout_s: float) -> None:
    """Have the server load the order's version. If it refuses damaged files, it continues with its own weights."""
    wanted = SendWeights(order.server, client.url, order.target.version, order.keeps_cache, timeout_s)
    try:
        await transport.bring(client, wanted, order.target.read_at)
    except DamagedVersion:
        if order.had is not None:
            await client.resume()
        raise


async def _check(
    order: BeginUpdate, client: GenerationServerClient, checks: Sequence[UpdateCheck], timeout_s: float
) -> None:
    try:
        for check in checks:
            await check(order.server, client, order.target)
    except HttpError:
        await client.pause(PauseMode.retract, timeout_s=timeout_s)  # nothing of these weights is handed out
        raise
