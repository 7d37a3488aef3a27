"""RolloutWorkers in name resolution: the manager awaits their first reports, and drops rollouts of dead ones."""

from __future__ import annotations

import asyncio
import logging

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver, Subtree
from asyncrl.manager.service import ManagerService

_WORKER_GONE = "%s is gone or silent: its rollouts are dropped, and their prompts wait for any worker"


class RolloutWorkers:
    """Reports to the service the RolloutWorkers that are ready, replaced, silent or gone.

    Args:
        of_launch: number of workers that the launcher starts, and starts again. Others have joined.

    Attributes:
        present: workers found at the last `look`.
    """

    def __init__(self, resolver: NameResolver, service: ManagerService, of_launch: int, log: logging.Logger) -> None:
        self._resolver, self._service, self._of_launch, self._log = resolver, service, of_launch, log
        self.present: set[str] = set()
        self._statuses: Subtree
        self._replaced: Subtree

    async def follow(self) -> None:
        """Begin to follow workers, and their processes that the launcher replaces."""
        follow = self._resolver.follow
        self._statuses = await asyncio.to_thread(follow, f"{names.STATUSES}/{names.ROLLOUT_WORKER}")
        self._replaced = await asyncio.to_thread(follow, f"{names.INCARNATIONS}/{names.ROLLOUT_WORKER}")

    async def look(self) -> None:
        """Report the present entries of name resolution."""
        workers = _incarnations(self._statuses, self._of_launch)
        if not self._service.begun:
            self._call_roll(_ready(self._statuses), _replaced(self._replaced))
        await self._drop_rollouts_of_replaced(_replaced(self._replaced))
        self._drop_rollouts_of_silent(workers)

    def _call_roll(self, ready: dict[str, int], replaced: dict[str, int]) -> None:
        """Await the reports of the workers that are `ready`, except processes that have died since."""
        self._service.await_workers(
            {worker: number for worker, number in ready.items() if number >= replaced.get(worker, 0)}
        )

    async def _drop_rollouts_of_replaced(self, replaced: dict[str, int]) -> None:
        """Drop the rollouts of workers whose death the launcher reports, and record the kind of death.

        This comes first, because a death makes running prompts suspects. If the dead worker's name expired first, it
        would count as silent, which need not be a death.
        """
        newest = self._service.newest_incarnation
        new = {worker: number for worker, number in replaced.items() if number > newest(worker)}
        if new:
            tree = await asyncio.to_thread(self._resolver.get_subtree, f"{names.KILLED}/{names.ROLLOUT_WORKER}")
            killed = {f"{names.ROLLOUT_WORKER}/{names.index_of(key)}": int(number) for key, number in tree.items()}
            for worker, number in new.items():
                if self._service.incarnation_seen(worker, number, killed=killed.get(worker) == number):
                    self._log.warning(_WORKER_GONE, worker)

    def _drop_rollouts_of_silent(self, workers: dict[str, int]) -> None:
        """Drop the rollouts of workers that are silent, gone, or another incarnation than before."""
        new = [worker for worker, number in workers.items() if self._service.incarnation_seen(worker, number)]
        gone = self.present - workers.keys()
        self.present = set(workers)
        for worker in gone:
            self._service.worker_died(worker)
        for worker in [*gone, *new, *self._service.expire_workers()]:
            self._log.warning(_WORKER_GONE, worker)


def _replaced(entries: Subtree) -> dict[str, int]:
    """Return RolloutWorkers by name that the launcher replaces, with the incarnation that follows."""
    return {f"{names.ROLLOUT_WORKER}/{names.index_of(key)}": int(number) for key, number in entries.entries().items()}


def _ready(statuses: Subtree) -> dict[str, int]:
    """Return RolloutWorkers by name that may hold rollouts, with their incarnation."""
    found = {names.index_of(key): names.WorkerStatus.decode(value) for key, value in statuses.entries().items()}
    return {
        f"{names.ROLLOUT_WORKER}/{index}": each.incarnation for index, each in found.items() if each.state == "ready"
    }


def _incarnations(statuses: Subtree, of_launch: int) -> dict[str, int]:
    """Return RolloutWorkers by name, with their incarnation. Joined workers, which have no successors, only if they
    have not left.
    """
    found: dict[str, int] = {}
    for key, value in statuses.entries().items():
        index, status = names.index_of(key), names.WorkerStatus.decode(value)
        if status.state in ("starting", "ready") or index < of_launch:
            found[f"{names.ROLLOUT_WORKER}/{index}"] = status.incarnation
    return found
