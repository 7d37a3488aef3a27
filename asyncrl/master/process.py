"""MasterWorker: decides which rollouts are trained in which step, without touching a tensor.

A stop waits for the current step and a checkpoint, which need all ranks. While the run continues, the MasterWorker
waits for a rank that does not respond (its host is cut off, or it hangs), since the rank may recover. After a stop it
waits only briefly (`await_while_responsive`). A rank's I/O thread answers even while the rank computes or waits in a
collective, so only the ranks that the others wait for are unresponsive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from asyncrl.comm import names
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.comm.waits.limits import LOOK_S
from asyncrl.manager.client import ManagerClient
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.parts import Peers, assemble
from asyncrl.master.peers.connections import NameBoard, ReplaceableWorker, connect, router_of_peers
from asyncrl.master.peers.rank_clients import Pulses
from asyncrl.master.train_loop import TrainLoop
from asyncrl.runtime.process.waiting import StopRequested, cancel
from asyncrl.runtime.process.worker import AsyncWorker, CannotContinue
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint, uses_memory_checkpoint
from asyncrl.trainer.parallel.placement import placement


class MasterWorker(AsyncWorker):
    """Finds the other processes, then runs the loop (`TrainLoop`) to its end."""

    stop_limit_s = None

    def configure(self) -> None:
        self._graph = load_graph(self.config)
        self._placement = placement(self.config, self._graph)

    async def main(self) -> None:
        async with AsyncExitStack() as closing:
            try:
                peers = await self._connect(closing)
            except StopRequested:
                return
            memory_checkpoint = MemoryCheckpoint(self.run_dir) if uses_memory_checkpoint(self.config) else None
            parts = assemble(
                self.config, self.run_dir, self._graph, peers, self.stop, memory_checkpoint=memory_checkpoint
            )
            await await_while_responsive(
                TrainLoop(parts, self.ready).run(), peers.workers, self.stop, self.config.system.stop_timeout_s
            )

    async def _connect(self, closing: AsyncExitStack) -> Peers:
        workers = range(0 if self.config.samples.replay else self.config.rollout.workers)  # of evaluations
        router = router_of_peers(self, self._placement.workers + len(workers))
        closing.callback(router.close)
        url = await self.registered(names.MANAGER_KEY, names.GSERVER_MANAGER)
        find = partial(self.resolver.get, names.MANAGER_KEY)
        manager = ManagerClient(url, self.name, self.http_security, find=find)
        closing.push_async_callback(manager.close)
        trainers = await connect(self, names.MODEL_WORKER, self._placement.workers, router)
        rollouts = [await ReplaceableWorker.connect(self, names.ROLLOUT_WORKER, index, router) for index in workers]
        for trainer in trainers:
            closing.callback(trainer.close)
        for rollout in rollouts:
            closing.callback(rollout.close)
        board = NameBoard(self.resolver)
        await asyncio.to_thread(board.producers_start)  # the first look reads, the others do not
        return Peers(trainers, self._placement, manager, rollouts, board)


class RanksUnresponsive(CannotContinue):
    """Ranks do not answer, so nothing can be finished or saved; the message names them."""


async def await_while_responsive(
    running: Coroutine[Any, Any, None], workers: Sequence[RequestClient], stop: asyncio.Event, limit_s: float
) -> None:
    """Await `running`, after `stop` is set only as long as all `workers`, the ranks by index, answer.

    Raises:
        RanksUnresponsive: one has not answered for `limit_s` seconds in which this process ran; `running` is cancelled.
        Exception: raised by `running`.
    """
    task = asyncio.create_task(running)
    asking = asyncio.create_task(_silence(workers, stop, limit_s))
    try:
        await asyncio.wait({task, asking}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
        raise RanksUnresponsive(
            f"no answer from {asking.result()} for {limit_s:g} s (system.stop_timeout_s) after the request to stop: "
            f"the current step cannot be finished and no checkpoint can be written. The same command continues from "
            f"the newest one"
        )
    finally:
        await cancel(task, asking)


async def _silence(workers: Sequence[RequestClient], stop: asyncio.Event, limit_s: float) -> str:
    """Wait until some workers do not answer after a stop; return their names."""
    await stop.wait()
    pulses = Pulses(workers)
    while not (silent := await pulses.ask(limit_s)):  # noqa: ASYNC110  # what is waited for is in other processes
        await asyncio.sleep(LOOK_S)
    return silent
