"""Whether the ranks still answer, once a stop is asked for.

A stop waits for the step in hand and a checkpoint, which take all ranks. One that is silent (its host is cut off, it
was stopped, it hangs) is waited for while the run goes on, since it may come back. Whoever asked for the end is not to
wait for long, and to be told for whom.

A rank answers in its thread of I/O, whatever it computes, also while it waits for a peer in a collective. So those who
do not are the ones that the others wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from asyncrl.comm.request_reply.client import PeerGone, RequestClient, RequestTimeout
from asyncrl.runtime.waiting import cancel
from asyncrl.trainer.messages import LookIntoStep

ASK_AGAIN_S = 1.0


class RanksSilent(RuntimeError):
    """Ranks do not answer, so that nothing can be finished or saved; the message names them."""


async def unless_silent(
    running: Coroutine[Any, Any, None], workers: Sequence[RequestClient], stop: asyncio.Event, limit_s: float
) -> None:
    """Await `running`; once `stop` is set only as long as all `workers`, the ranks by index, answer.

    Raises:
        RanksSilent: one has not answered for `limit_s` seconds in which this process ran; `running` is cancelled.
        Exception: what `running` raises.
    """
    task = asyncio.create_task(running)
    asking = asyncio.create_task(_silence(workers, stop, limit_s))
    try:
        await asyncio.wait({task, asking}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
        silent = ", ".join(f"model_worker/{index}" for index in asking.result())
        raise RanksSilent(
            f"no answer from {silent} for {limit_s:g} s (system.stop_patience_s) after the request to stop: the step "
            "in hand cannot be finished, nor a checkpoint be written. The same command goes on from the newest one"
        )
    finally:
        await cancel(task, asking)


async def _silence(workers: Sequence[RequestClient], stop: asyncio.Event, limit_s: float) -> list[int]:
    """The workers that are silent, as soon as there are any."""
    await stop.wait()
    lost: set[int] = set()
    while True:
        asked = (worker.call(LookIntoStep(), timeout_s=limit_s) for worker in workers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        silent = {index for index, answer in enumerate(answers) if isinstance(answer, RequestTimeout)}
        lost_before, lost = lost, {index for index, answer in enumerate(answers) if isinstance(answer, PeerGone)}
        silent |= lost & lost_before  # a connection that broke is made again; the run hears of it as well
        if silent:
            return sorted(silent)
        await asyncio.sleep(ASK_AGAIN_S)
