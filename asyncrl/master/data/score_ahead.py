"""Scores of frozen models while a step waits for rollouts: what the reference and reward models say of those that came.

These models never change, so what they say of a rollout may be computed as soon as it is there. The proximal policy is
another one in each step, and a critic learns: theirs is computed in the step. While the step waits, the ranks score
what they have received, an eighth of a batch at a time: a batch that is complete meanwhile waits no longer than that.
What has not been scored by then, the step scores, as it does with all of it unless `trainer.score_ahead` is set.

Each rank scores what it received, so nothing moves; what it found travels with the rollout to the rank that trains it.
All ranks of the actor take part in each piece, as the models may be spread over them. So a model in a layout of its own
is not asked ahead, nor one that would move to the device and back for each piece (`trainer.offload`).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from asyncrl.algorithms.spec import WHOLE_DISTRIBUTIONS, KLPlace
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.data.buffer import SampleBuffer, TrainBatch
from asyncrl.master.graph.types import Call, Graph
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.trainer.messages import RunCall, ScoreAhead
from asyncrl.trainer.parallel.placement import Placement
from asyncrl.trainer.settings import ReferenceMode

PIECES = 8
"""Pieces in which a batch is scored."""


class AheadScorer:
    """Has the ranks score what waits in `buffer`.

    Args:
        calls: requests to make for each rollout; without any, nothing is scored ahead.
        actors: the actor's ranks.
        heads: number of those that receive rollouts.
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
        """Have the ranks score the oldest of what they have not scored; False, at once, if that is less than a piece.

        Raises:
            Stalled: a rank does not answer.
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
    """The calls of `graph` whose results depend on a rollout alone, and whose models lie on the actor's ranks."""
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
