"""One weight update of one generation server: the steps, in order, each with a check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from asyncrl.comm.http import HttpError
from asyncrl.inference.client import DamagedVersion, GenerationServerClient, PauseMode
from asyncrl.manager.fleet.decisions import BeginUpdate, Target
from asyncrl.trainer.messages import SendWeights
from asyncrl.weights.transports.base import ManagerEnd

UpdateCheck = Callable[[int, GenerationServerClient, Target], Awaitable[None]]
"""Looks at the server with this index, which has the target's weights and gets no requests yet; raises `HttpError`
where they are not what they should be.
"""


async def update_server(
    order: BeginUpdate,
    client: GenerationServerClient,
    transport: ManagerEnd,
    *,
    timeout_s: float,
    checks: Sequence[UpdateCheck] = (),
) -> None:
    """Bring the server to the order's target, then let it generate again.

    What runs is answered or kept, as the order says; what arrives is held until the server has its weights. If a step
    or a check fails the server is left paused: its weights are unknown, so it must not generate. One that refuses the
    files as damaged goes on with those it has, which the order names.

    Raises:
        DamagedVersion: it goes on with the version it had.
        HttpError: a step or a check failed.
    """
    if order.frozen:  # SGLang aborts what is frozen only once it runs again, but what is queued at once
        await client.pause(PauseMode.retract, timeout_s=timeout_s)
    await client.pause(order.pause, timeout_s=timeout_s)
    target = order.target
    wanted = SendWeights(order.server, client.url, target.version, order.keeps_cache, timeout_s)
    try:
        await transport.bring(client, wanted, target.read_at)
    except DamagedVersion:
        if order.had is not None:
            await client.resume()
        raise
    await client.resume()
    try:  # a server answers nothing while it is paused, so it cannot be checked before
        for check in checks:
            await check(order.server, client, order.target)
    except HttpError:
        await client.pause(PauseMode.retract, timeout_s=timeout_s)  # nothing of these weights is handed out
        raise
