"""Calls of the MasterWorker to all ranks or to some, each with the time limit of a run without progress."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.comm.request_reply.messages import R, Request
from asyncrl.runtime.process.starting import LONGEST_STARTS
from asyncrl.runtime.process.worker import CannotContinue
from asyncrl.trainer.messages import LoadCheckpoint, LoadedCheckpoint, LoadMemoryCheckpoint


class Stalled(CannotContinue):
    """No train step for too long; the message says which stage waits, for what, and which counter shows it."""


class RankClients:
    """The ModelWorkers.

    Args:
        workers: the ModelWorkers by index.
        publisher: index of the rank that publishes the actor, and commits checkpoints.
        limit_s: time limit of a reply.
        master: the incarnation of the calling master.
        load_s: time limit of the reply to `load`.
    """

    def __init__(
        self,
        workers: Sequence[RequestClient],
        publisher: int,
        limit_s: float,
        master: int = 0,
        load_s: float = math.inf,
    ) -> None:
        self.master = master
        self._workers, self._publisher, self._limit_s, self._load_s = workers, publisher, limit_s, load_s

    async def all(self, request: Request[R]) -> list[R]:
        """Make the call to every rank; return the replies by worker index.

        Raises:
            Stalled: one did not answer in time.
        """
        return await self.some(self._workers, request)

    async def load(self, request: LoadCheckpoint | LoadMemoryCheckpoint) -> list[LoadedCheckpoint]:
        """Have every rank restore a state, which may take long from a slow disk.

        Raises:
            Stalled: one did not answer in time.
        """
        limit_s = self._load_s
        try:
            return await asyncio.gather(*(worker.call(request, timeout_s=limit_s) for worker in self._workers))
        except TimeoutError as error:
            raise Stalled(
                f"{request.verb}: {error} (limit: {LONGEST_STARTS} times system.start_timeout_s, or "
                "system.stall_timeout_s)"
            ) from error

    async def each(self, requests: Sequence[Request[R]]) -> list[R]:
        """Make a different call to each rank; calls and replies are by worker index.

        Raises:
            Stalled: one did not answer in time.
        """
        return await self._answers(list(zip(self._workers, requests, strict=True)))

    async def some(self, workers: Sequence[RequestClient], request: Request[R]) -> list[R]:
        """Make the call to `workers`; return the replies in the same order.

        Raises:
            Stalled: one did not answer in time.
        """
        return await self._answers([(worker, request) for worker in workers])

    async def publisher(self, request: Request[R]) -> R:
        """Make the call to the rank that publishes the actor and commits checkpoints.

        Raises:
            Stalled: it did not answer in time.
        """
        return (await self.some([self._workers[self._publisher]], request))[0]

    async def _answers(self, calls: Sequence[tuple[RequestClient, Request[R]]]) -> list[R]:
        try:
            return await asyncio.gather(*(worker.call(request, timeout_s=self._limit_s) for worker, request in calls))
        except TimeoutError as error:
            raise Stalled(f"{calls[0][1].verb}: {error} (limit: system.stall_timeout_s)") from error
