"""Each rank is told its own part of a step, and the parts are the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm.request_reply import encode
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.step import Assignment, Dealing, assign, minibatches_of_groups, plan_batch, plan_step
from asyncrl.trainer.messages import BeginStep, RolloutRecord
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid

PLACEMENTS = [
    Placement({"actor": WorkerGrid()}),
    Placement({"actor": WorkerGrid(data=3)}),
    Placement({"actor": WorkerGrid(data=2, tensor=2), "ref": WorkerGrid(tensor=2), "critic": WorkerGrid(2, first=4)}),
    Placement({"actor": WorkerGrid(data=2, tensor=2, pipeline=2), "ref": WorkerGrid(data=3, first=8)}),
]


def plan(cuts: Sequence[Sequence[Assignment]], placement: Placement) -> list[BeginStep]:
    return plan_step(cuts, placement, version=7, min_version=5, minibatches=2)


@given(data=st.data(), placement=st.sampled_from(PLACEMENTS), rollouts=st.integers(0, 12))
def test_each_rollout_leaves_where_it_was_received_and_comes_to_one_copy_of_each_grid(
    data: st.DataObject, placement: Placement, rollouts: int
) -> None:
    actor, grids = placement.actor, placement.distinct
    sources = [data.draw(st.integers(0, actor.data - 1)) for _ in range(rollouts)]
    goes = [[data.draw(st.integers(0, grid.data - 1)) for _ in range(rollouts)] for grid in grids]
    cuts = [[Assignment(f"r{row}", sources[row], to[row], (row % 2,)) for row in range(rollouts)] for to in goes]
    steps = plan(cuts, placement)
    assert len(steps) == placement.workers
    for worker, step in enumerate(steps):
        assert (step.version, step.min_version, step.num_minibatches) == (7, 5, 2)
        held = [row for row in range(rollouts) if actor.data_heads[sources[row]] == worker]
        assert step.leaving == tuple(f"r{row}" for row in held)
        for index, grid in enumerate(grids):
            assert step.targets[index] == tuple(grid.data_heads[goes[index][row]] for row in held)
            share = step.shares[index]
            if worker not in grid.members:
                assert share is None
                continue
            rows = [row for row in range(rollouts) if goes[index][row] == grid.coordinates(worker).data]
            assert share is not None
            assert share.rollout_ids == tuple(f"r{row}" for row in rows)
            assert share.minibatches == tuple((row % 2,) for row in rows)
            assert share.sources == tuple(actor.data_heads[sources[row]] for row in rows)
            heads = tuple(
                tuple(other.data_heads[to[row]] for row in rows) for other, to in zip(grids, goes, strict=True)
            )
            assert share.heads == heads


def record(order: int, head: int = 0, **fields: Any) -> RolloutRecord:
    sizes = {"lengths": (4, 6), "generated": (2, 4), "rewards": (0.0, 1.0), "truncated": (False, False)}
    values = {"oldest_version": 5, "version_tokens": {5: 6}, **sizes, "episodes": (0, 1)} | fields
    return RolloutRecord(f"r{order}", f"e0-{order}", order, head, **values)


def test_a_batch_is_dealt_to_the_copies_of_every_grid_as_the_settings_say() -> None:
    config = ExperimentConfig(seed=3)
    config.trainer.ppo_minibatches, config.trainer.ppo_epochs = 2, 3
    dealing = Dealing.of(config)
    assert dealing == Dealing(2, 3, 3, ())
    assert dealing.optimizer_steps == 6
    placement = Placement({"actor": WorkerGrid(data=2), "critic": WorkerGrid(data=1, first=2)})
    batch = TrainBatch(7, 5, tuple(record(order, order % 2) for order in range(8)))
    cuts = [assign(batch.records, ranks, dealing, 7) for ranks in (2, 1)]
    expected = plan_step(cuts, placement, version=7, min_version=5, minibatches=6)
    assert plan_batch(batch, placement, dealing) == expected
    assert Dealing(4) == Dealing(4, passes=1, seed=0)


def test_a_rollout_is_in_a_minibatch_of_each_policy_dealt_by_the_signal_of_its_samples() -> None:
    dealing = Dealing(2, 2, seed=1, policies=("judge",))
    own, judged = {"groups": ("", "")}, {"groups": ("judge", "judge")}
    records = [record(order, **(own if order % 3 else judged)) for order in range(8)]
    cut = assign(records, 1, dealing, 4)
    signals = ([order % 3 > 0 for order in range(8)], [order % 3 == 0 for order in range(8)])
    expected = [minibatches_of_groups(signal, dealing, 4).tolist() for signal in signals]
    assert [list(entry.minibatches) for entry in cut] == [a + b for a, b in zip(*expected, strict=True)]


@pytest.mark.parametrize("ranks", [4, 64])
def test_what_a_rank_is_told_grows_with_its_own_rollouts_alone(ranks: int) -> None:
    cut = [Assignment(f"r{row:06}", row % ranks, row // 8 % ranks, (0,)) for row in range(8 * ranks)]
    sizes = [len(encode(step)) for step in plan([cut], Placement({"actor": WorkerGrid(data=ranks)}))]
    assert max(sizes) < 400
