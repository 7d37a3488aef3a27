"""Each rank is told its own part of a step, and the parts are the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm.request_reply.messages import encode
from asyncrl.master.data.step_plan import Assignment, plan_step
from asyncrl.trainer.messages import BeginStep
from asyncrl.trainer.parallel.worker_grid import Placement, WorkerGrid

PLACEMENTS = [
    Placement({"actor": WorkerGrid()}),
    Placement({"actor": WorkerGrid(data=3)}),
    Placement({"actor": WorkerGrid(data=2, tensor=2), "ref": WorkerGrid(tensor=2), "critic": WorkerGrid(2, first=4)}),
    Placement({"actor": WorkerGrid(data=2, tensor=2, pipeline=2), "ref": WorkerGrid(data=3, first=8)}),
]


def plan(cuts: Sequence[Sequence[Assignment]], placement: Placement) -> list[BeginStep]:
    return plan_step(cuts, placement, version=7, min_version=5, minibatches=2, master=3)


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
        assert (step.version, step.min_version, step.num_minibatches, step.master) == (7, 5, 2, 3)
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


@pytest.mark.parametrize("ranks", [4, 64])
def test_what_a_rank_is_told_grows_with_its_own_rollouts_alone(ranks: int) -> None:
    cut = [Assignment(f"r{row:06}", row % ranks, row // 8 % ranks, (0,)) for row in range(8 * ranks)]
    sizes = [len(encode(step)) for step in plan([cut], Placement({"actor": WorkerGrid(data=ranks)}))]
    assert max(sizes) < 400
