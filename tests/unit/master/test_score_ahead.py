"""What is asked of frozen models before a step, and when."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.comm.request_reply import Done
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.data.sample_buffer import SampleBuffer, TrainBatch
from asyncrl.master.data.while_waiting import AheadScorer, frozen_calls
from asyncrl.master.graph import Call, Graph, grpo, ppo
from asyncrl.master.peers import RankClients
from asyncrl.trainer.messages import RolloutRecord, ScoreAhead
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.settings import ReferenceMode, RoleRanks

CALL = Call("ref_inf", "ref", "ref_inf", ("tokens", "loss_mask"), ("ref_logprobs",))


class Worker:
    """Answers every request."""

    def __init__(self) -> None:
        self.asked: list[ScoreAhead] = []

    async def call(self, request: ScoreAhead, *, timeout_s: float) -> Done:
        self.asked.append(request)
        return Done()


def records(orders: range, heads: int = 1) -> list[RolloutRecord]:
    fields: tuple[Any, ...] = (0, {0: 4}, (4, 4), (2, 2), (0.0, 1.0), (False, True), (0, 1))
    return [RolloutRecord(f"r{order}", f"e0-{order}", order, order % heads, *fields) for order in orders]


def scorer(buffer: SampleBuffer, workers: list[Worker], calls: tuple[Call, ...] = (CALL,)) -> AheadScorer:
    ranks = RankClients(workers, 0, 1.0)  # type: ignore[arg-type]  # they have the one method that is used
    return AheadScorer(calls, buffer, ranks, workers, heads=len(workers))  # type: ignore[arg-type]


async def test_an_eighth_of_a_batch_is_scored_at_a_time_each_rollout_once_by_the_head_that_holds_it() -> None:
    buffer, workers = SampleBuffer(16, 4, "drop"), [Worker(), Worker()]
    ahead = scorer(buffer, workers)
    buffer.add(records(range(1), heads=2))
    assert not await ahead.piece(3), "less than a piece"
    buffer.add(records(range(1, 5), heads=2))
    assert await ahead.piece(3)
    assert await ahead.piece(3)
    assert not await ahead.piece(3), "one is left"
    buffer.add(records(range(5, 16), heads=2))
    batch = buffer.take(0)
    assert batch is not None
    assert workers[0].asked == workers[1].asked, "all ranks take part in each piece"
    assert [request.rollout_ids for request in workers[0].asked] == [(("r0",), ("r1",)), (("r2",), ("r3",))]
    assert {request.version for request in workers[0].asked} == {3}
    metrics = ahead.pop_metrics(batch)
    assert metrics["rollout/scored_ahead"] == 4 / 16
    assert 0 < metrics["time/score_ahead_s"] < 600
    assert ahead.pop_metrics(batch)["time/score_ahead_s"] == 0


async def test_of_a_batch_of_less_than_eight_one_rollout_is_scored_at_a_time() -> None:
    buffer, worker = SampleBuffer(7, 4, "drop"), Worker()
    ahead = scorer(buffer, [worker])
    assert ahead.pop_metrics(TrainBatch(0, 0, tuple(records(range(1))))) == {
        "rollout/scored_ahead": 0.0,
        "time/score_ahead_s": 0.0,
    }
    buffer.add(records(range(2)))
    assert [await ahead.piece(0) for _ in range(3)] == [True, True, False]
    assert [request.rollout_ids for request in worker.asked] == [(("r0",),), (("r1",),)]


async def test_a_rollout_that_left_the_buffer_is_not_remembered() -> None:
    buffer, worker = SampleBuffer(1, 0, "drop"), Worker()
    ahead = scorer(buffer, [worker])
    buffer.add(records(range(2)))
    assert await ahead.piece(0)
    buffer.expire(1)
    assert not await ahead.piece(1)
    assert not ahead._scored


async def test_nothing_is_asked_where_nothing_is_frozen() -> None:
    buffer, worker = SampleBuffer(2, 4, "drop"), Worker()
    ahead = scorer(buffer, [worker], calls=())
    buffer.add(records(range(2)))
    assert not await ahead.piece(0)
    batch = buffer.take(0)
    assert batch is not None
    assert (worker.asked, ahead.pop_metrics(batch)) == ([], {})


def names(config: ExperimentConfig, graph: Graph | None = None) -> list[str]:
    graph = graph or grpo(config)
    return [call.name for call in frozen_calls(config, graph, placement(config, graph))]


def with_reference(**settings: Any) -> ExperimentConfig:
    config = ExperimentConfig()
    config.algorithm.kl_coef, config.trainer.score_ahead = 0.1, True
    for name, value in settings.items():
        group, _, field = name.rpartition("__")
        where: Any = config
        for part in group.split("__"):
            where = getattr(where, part)
        setattr(where, field, value)
    return config


def test_frozen_models_on_the_actors_ranks_are_asked_ahead() -> None:
    assert names(with_reference()) == ["ref_inf"]
    assert names(with_reference(), ppo(with_reference())) == ["ref_inf"], "a critic learns, the proximal policy moves"
    judge = Call("judge", "judge", "reward", ("tokens",), ("judged",), args={"path": "folder"})
    own = Call("own", "judge", "reward", ("tokens", "judged"), ("again",))
    graph = Graph("judged", (judge, own, *grpo(with_reference()).calls))
    assert names(with_reference(), graph) == ["judge", "ref_inf"], "not what depends on another call"


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer__score_ahead": False},
        {"trainer__offload": True},
        {"algorithm__kl_coef": 0.0},
        {"algorithm__reference__mode": ReferenceMode.ema},
        {"algorithm__reference__ranks": RoleRanks.own},
        {"algorithm__kl__name": "full"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_changes_moves_or_is_not_read_is_not_asked_ahead(settings: dict[str, Any]) -> None:
    assert names(with_reference(**settings)) == []
