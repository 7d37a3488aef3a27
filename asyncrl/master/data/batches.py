"""The batches of a run's steps, and the wait of each step for its batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from asyncrl.comm.waits.limits import HOLD_S, LOOK_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.client import ManagerClient
from asyncrl.master.data.buffer_order import ConfiguredOrder
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.data.score_ahead import AheadScorer
from asyncrl.master.data.stall import PromptsUsedUp, StallWatch
from asyncrl.master.peers.guest_turns import DeviceTurns
from asyncrl.master.settings import OnStale

_log = logging.getLogger(__name__)


async def _at_most(waiting: Coroutine[Any, Any, object], seconds: float) -> None:
    """Await `waiting` for at most this long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waiting


class Batches:
    """Takes each step's batch from `buffer` once the batch is complete.

    Args:
        report: reports expired rollouts to the manager, at the version given.
        turns: gives the devices to servers on them before a step waits for rollouts.
        order: the user's order, if there is one.
        ahead: scores received rollouts while the step waits for the rest.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        buffer: SampleBuffer,
        collector: Collector,
        manager: ManagerClient,
        stall: StallWatch,
        report: Callable[[int], Awaitable[None]],
        turns: DeviceTurns,
        order: ConfiguredOrder,
        ahead: AheadScorer,
    ) -> None:
        self._size, self._on_stale = config.train_batch_size, config.on_stale
        self._buffer, self._collector, self._manager = buffer, collector, manager
        self._stall, self._report, self._turns, self._order, self._ahead = stall, report, turns, order, ahead

    async def next(self, version: int) -> TrainBatch:
        """Wait for the batch of the step from `version` and return it.

        Raises:
            StopRequested, Stalled: see `StallWatch.wait`.
            PromptsUsedUp: fewer rollouts are left than make a batch.
        """
        while True:
            await self._enough_rollouts(version)
            if self._on_stale == OnStale.wait:
                await self._nothing_would_expire(version)
            ranks = await self._order.ranks(self._buffer.live(), version)
            batch = self._buffer.take(version, ranks)
            if batch is not None:
                await self._order.trained(batch.records, version)
                return batch

    def pop_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return the metrics of the user's order and of the scores ahead, for the step of `batch`."""
        return self._order.metrics() | self._ahead.pop_metrics(batch)

    async def _enough_rollouts(self, version: int) -> None:
        used_up_at: int | None = None
        while True:
            self._buffer.expire(version)
            await self._report(version)  # expired rollouts make room at the gate for missing ones
            missing = self._size - len(self._buffer)
            if missing > 0 and self._turns.training:  # rollouts at the ranks may spare a switch
                await self._refreshed(version)
                missing = self._size - len(self._buffer)
            if missing <= 0:
                return
            lent = await self._turns.lend(missing)
            if await self._ahead.piece(version):
                continue
            began, before = time.monotonic(), self._buffer.received
            more = self._collector.changed(missing)
            waiting = more if lent else _at_most(more, LOOK_S)
            try:
                await self._stall.wait(waiting, version, "trajectories from the RolloutWorkers", rollouts=True)
            except PromptsUsedUp:
                await self._refreshed(version)  # the manager may know of rollouts earlier than this process
                if used_up_at == self._buffer.received:
                    raise
                used_up_at = self._buffer.received
            self._turns.waited(self._buffer.received - before, time.monotonic() - began)

    async def _nothing_would_expire(self, version: int) -> None:
        """Hold the step until every rollout that a later step could not train is in the buffer."""
        what = "the end of rollouts that would expire (on_stale=wait)"
        hold_s = min(HOLD_S, self._stall.limit_s / 2)

        def asked() -> Coroutine[Any, Any, Sequence[str]]:
            return self._manager.wait_expiring(version, 0.0 if self._turns.training else hold_s)

        while running := await self._stall.wait(asked(), version, what, rollouts=True):
            self._turns.give()
            _log.info("step %d is held for %d rollouts that would expire", version, len(running))
        await self._refreshed(version)

    async def _refreshed(self, version: int) -> None:
        await self._stall.wait(self._collector.refresh(), version, "the ModelWorkers to report what they received")
