"""The batches of a run's steps, the wait of each step for its batch, and what the ranks do meanwhile.

Scores ahead. Frozen models (reference, reward) never change, so a rollout can be scored as soon as it is received. The
proximal policy changes with each step and a critic learns, so their outputs are computed in the step. While the step
waits, the ranks score what they have received, an eighth of a batch at a time. So a batch that is complete meanwhile
waits for one such piece at most. The step scores the other rollouts; without `trainer.score_ahead` it scores all.

Each rank scores the rollouts that it received, so none is moved. The scores travel with the rollout to the rank that
trains it. All ranks of the actor take part in each piece, as the models may be spread over them. So a model in another
layout is not used ahead, nor a model that would move to the device and back for each piece (`trainer.offload`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS, KLPlace
from asyncrl.comm.request_reply import RequestClient
from asyncrl.comm.waits import HOLD_S, LOOK_S
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.client import ManagerClient
from asyncrl.master.data.collector import Collector, Reports
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.data.stall import PromptsUsedUp, StallWatch
from asyncrl.master.evaluations import Row
from asyncrl.master.graph import Call, Graph
from asyncrl.master.peers import RankClients
from asyncrl.master.settings import OnStale
from asyncrl.runtime.process.waiting import cancel
from asyncrl.trainer.messages import RunCall, ScoreAhead
from asyncrl.trainer.parallel.placement import Placement
from asyncrl.trainer.settings import ReferenceMode

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.master.data.order import ConfiguredOrder

_log = logging.getLogger(__name__)

PIECES = 8
"""Pieces in which a batch is scored."""


class DeviceTurns:
    """The trainer's turns on devices that it shares with generation servers. Here it shares none, so every call does
    nothing; `asyncrl.colocated.master` has the turns on shared ones.
    """

    @property
    def training(self) -> bool:
        """True if the trainer has shared devices, or waits for servers to leave them."""
        return False

    def begin(self) -> None:
        """Give the devices to the servers, until there is a batch: the ranks have loaded their models."""

    async def lend(self, missing: int) -> bool:
        """Give the devices to servers while the batch lacks `missing` rollouts, if that completes the batch earlier.

        Returns:
            True if the servers have the devices.
        """
        return True

    def waited(self, rollouts: int, seconds: float) -> None:
        """Count `rollouts` that arrived within `seconds` of the wait for a batch."""

    def give(self) -> None:
        """Give the devices to the servers, if they do not have them."""

    async def take(self, version: int) -> Row:
        """Take the devices for the step at `version`; return the metrics of the switch."""
        return {}

    async def take_to_end(self, limit_s: float) -> None:
        """Take the devices to save a run that was asked to stop; after `limit_s`, warn and return without them."""


class Batches:
    """Takes each step's batch from `buffer` once the batch is complete.

    Args:
        order: the user's order (`buffer.order.path`); None: there is none.
        ahead: scores received rollouts while the step waits for the rest.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        buffer: SampleBuffer,
        collector: Collector,
        manager: ManagerClient,
        stall: StallWatch,
        reports: Reports,
        turns: DeviceTurns,
        order: ConfiguredOrder | None,
        ahead: AheadScorer,
    ) -> None:
        self._size, self._on_stale = config.train_batch_size, config.on_stale
        self._buffer, self._collector, self._manager = buffer, collector, manager
        self._stall, self._reports, self._turns, self._order, self._ahead = stall, reports, turns, order, ahead

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
            ranks = {} if self._order is None else await self._order.ranks(self._buffer.live(), version)
            batch = self._buffer.take(version, ranks)
            if batch is not None:
                if self._order is not None:
                    await self._order.trained(batch.records, version)
                return batch

    def pop_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return the metrics of the user's order and of the scores ahead, for the step of `batch`."""
        of_order = {} if self._order is None else self._order.metrics()
        return of_order | self._ahead.pop_metrics(batch)

    async def _enough_rollouts(self, version: int) -> None:
        used_up_at: int | None = None
        while True:
            self._buffer.expire(version)
            await self._reports.dropped(version)  # expired rollouts make room at the gate for missing ones
            missing = self._size - len(self._buffer)
            if missing > 0 and self._turns.training:  # rollouts at the ranks may spare a switch
                await self._refreshed(version)
                missing = self._size - len(self._buffer)
            if missing <= 0:
                return
            lent = await self._turns.lend(missing)
            if await self._ahead.piece(version):
                continue
            more, what = self._more(missing, lent=lent), "trajectories from the RolloutWorkers"
            try:
                await self._stall.wait(more, version, what, rollouts=True)
            except PromptsUsedUp:
                await self._refreshed(version)  # the manager may know of rollouts earlier than this process
                if used_up_at == self._buffer.received:
                    raise
                used_up_at = self._buffer.received

    async def _more(self, missing: int, *, lent: bool) -> None:
        """Wait until rollouts arrive. While the devices are not lent, ask again and again whether they are to be."""
        arriving = asyncio.ensure_future(self._collector.changed(missing))
        try:
            while True:
                began, before = time.monotonic(), self._buffer.received
                await asyncio.wait({arriving}, timeout=None if lent else LOOK_S)
                self._turns.waited(self._buffer.received - before, time.monotonic() - began)
                if arriving.done():
                    return arriving.result()
                lent = await self._turns.lend(missing)
        finally:
            await cancel(arriving)

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


class AheadScorer:
    """Has the ranks score the rollouts that wait in `buffer`.

    Args:
        calls: requests to make for each rollout; without any, nothing is scored ahead.
        actors: the actor's ranks.
        heads: number of ranks that receive rollouts.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        buffer: SampleBuffer,
        ranks: RankClients,
        actors: Sequence[RequestClient],
        heads: int,
    ) -> None:
        self._calls = tuple(RunCall.of(call) for call in calls)
        self._buffer, self._ranks, self._actors, self._heads = buffer, ranks, actors, heads
        self._piece = max(1, buffer.batch_size // PIECES)
        self._scored: set[str] = set()
        self._spent_s = 0.0

    async def piece(self, version: int) -> bool:
        """Have the ranks score the next piece of rollouts, in order of arrival; return False at once if fewer are
        unscored.
        """
        if not self._calls:
            return False
        waiting = self._buffer.live()
        self._scored &= {record.rollout_id for record in waiting}
        new = [record for record in waiting if record.rollout_id not in self._scored][: self._piece]
        if len(new) < self._piece:
            return False
        began = perf_counter()
        held = tuple(tuple(each.rollout_id for each in new if each.head == head) for head in range(self._heads))
        await self._ranks.some(self._actors, ScoreAhead(version, held, self._calls))
        self._scored.update(record.rollout_id for record in new)
        self._spent_s += perf_counter() - began
        return True

    def pop_metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Return the share of `batch` that was scored ahead, and the time spent on it since the last call."""
        if not self._calls:
            return {}
        spent_s, self._spent_s = self._spent_s, 0.0
        scored = sum(record.rollout_id in self._scored for record in batch.records)
        return {"rollout/scored_ahead": scored / len(batch.records), "time/score_ahead_s": spent_s}


def frozen_calls(config: ExperimentConfig, graph: Graph, placement: Placement) -> list[Call]:
    """Return the calls of `graph` whose results depend on a rollout alone and whose models are on the actor's ranks."""
    if not config.trainer.score_ahead or config.trainer.offload:
        return []
    algorithm = config.algorithm
    whole = algorithm.kl_in == KLPlace.loss and algorithm.kl_estimator.name in WHOLE_DISTRIBUTIONS
    reference = algorithm.reference.mode == ReferenceMode.frozen and not whole
    asked = {"reward", "teacher_inf"} | ({"ref_inf"} if reference else set())
    return [
        call
        for call in graph.calls
        if call.function in asked
        and {*call.reads} <= {"tokens", "loss_mask"}
        and placement.grid(call.role) == placement.actor
    ]
