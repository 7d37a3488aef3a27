"""What the ranks do while a step waits for its batch: they score rollouts ahead, or leave shared devices to servers.

Scores ahead. Frozen models (reference, reward) never change, so a rollout can be scored as soon as it is received. The
proximal policy changes with each step and a critic learns, so their outputs are computed in the step. While the step
waits, the ranks score what they have received, an eighth of a batch at a time. So a batch that is complete meanwhile
waits for one such piece at most. The step scores the other rollouts; without `trainer.score_ahead` it scores all.

Each rank scores the rollouts that it received, so none is moved. The scores travel with the rollout to the rank that
trains it. All ranks of the actor take part in each piece, as the models may be spread over them. So a model in another
layout is not used ahead, nor a model that would move to the device and back for each piece (`trainer.offload`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from asyncrl.algorithms.registry import WHOLE_DISTRIBUTIONS, KLIn
from asyncrl.comm.request_reply import RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.evaluations import Row
from asyncrl.master.graph import Call, Graph
from asyncrl.master.peers import RankClients
from asyncrl.trainer.messages import RunCall, ScoreAhead
from asyncrl.trainer.parallel.placement import Placement
from asyncrl.trainer.settings import ReferenceMode

PIECES = 8
"""Pieces in which a batch is scored."""


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
    whole = algorithm.kl_in == KLIn.loss and algorithm.kl_estimator.name in WHOLE_DISTRIBUTIONS
    reference = algorithm.reference.mode == ReferenceMode.frozen and not whole
    asked = {"reward", "teacher_inf"} | ({"ref_inf"} if reference else set())
    return [
        call
        for call in graph.calls
        if call.function in asked
        and {*call.reads} <= {"tokens", "loss_mask"}
        and placement.grid(call.role) == placement.actor
    ]


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

    async def wake(self, missing: int) -> bool:
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
