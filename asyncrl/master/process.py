"""MasterWorker: decides which rollouts are trained in which step, without touching a tensor."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from asyncrl.comm import names
from asyncrl.manager.client import ManagerClient
from asyncrl.master.graph import load_graph
from asyncrl.master.peers import NameBoard, ReplaceableWorker, await_while_responsive, connect, router_of_peers
from asyncrl.master.train_loop import Peers, TrainLoop
from asyncrl.runtime.process.waiting import StopRequested
from asyncrl.runtime.process.worker import AsyncWorker
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
            loop = TrainLoop(
                self.config,
                self.run_dir,
                self._graph,
                peers,
                self.stop,
                self.ready,
                memory_checkpoint=memory_checkpoint,
            )
            await await_while_responsive(loop.run(), peers.workers, self.stop, self.config.system.stop_timeout_s)

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
