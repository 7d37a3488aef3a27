"""RolloutWorkers deal the training ranks out among them, and again when one of them goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameBackend, make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.rollout.process import RolloutWorker
from asyncrl.runtime.process.worker import WorkerSpec

LIMIT_S = 300.0
RANKS = {0: "tcp://rank-0", 1: "tcp://rank-1"}


class Following(RolloutWorker):
    """A RolloutWorker that does nothing but follow the ranks; it pushes nowhere, and knows where it would."""

    def __init__(self, index: int, root: Path) -> None:
        self.spec = WorkerSpec(names.ROLLOUT_WORKER, index, root)
        self.config, self.resolver = ExperimentConfig(), make_resolver(NameBackend.file, str(root))
        self.config.rollout.workers = len(RANKS)
        self.addresses: set[str] = set()

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Record the addresses, in place of the pusher."""
        self.addresses = set(addresses)

    async def follow(self) -> None:
        """As in a run."""
        await self._follow_pullers(cast(Any, self))


def test_each_worker_has_a_rank_of_its_own_and_the_last_one_has_all(tmp_path: Path) -> None:
    async def play() -> None:
        workers = [Following(index, tmp_path) for index in RANKS]
        ranks = make_resolver(NameBackend.file, str(tmp_path))
        for index, address in RANKS.items():
            ranks.add(names.puller_key(index), address)
        tasks = [asyncio.create_task(worker.follow()) for worker in workers]

        async def until(wanted: list[set[str]]) -> None:
            while [worker.addresses for worker in workers[: len(wanted)]] != wanted:
                assert not any(task.done() for task in tasks[: len(wanted)])
                await asyncio.sleep(0.02)

        try:
            await asyncio.wait_for(until([{"tcp://rank-0"}, {"tcp://rank-1"}]), LIMIT_S)
            tasks[1].cancel()
            workers[1].resolver.close()
            await asyncio.wait_for(until([set(RANKS.values())]), LIMIT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for worker in workers:
                worker.resolver.close()
            ranks.close()

    asyncio.run(play())
