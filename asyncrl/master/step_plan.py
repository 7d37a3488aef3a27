"""What each rank is told of a step: its own part of the plan, made here once.

From the data head that received it each rollout goes to one copy of every grid of roles, dealt to each grid in its own
way (`asyncrl.master.assignment`). A rank is told which of those that it holds go where (`BeginStep.leaving`), and of
each grid that it is of, which its copy gets and from whom (`GridShare`). So what it reads and does grows with its own
share of the batch, not with the batch. For n rollouts, g grids and R ranks the plan takes O(n g^2 + R g).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.master.assignment import Assignment, assign
from asyncrl.master.buffer import TrainBatch
from asyncrl.trainer.messages import BeginStep, GridShare
from asyncrl.trainer.placement import Placement


def plan_batch(
    batch: TrainBatch, placement: Placement, *, minibatches: int, seed: int, master: int = 0
) -> list[BeginStep]:
    """The request to each ModelWorker, by index: `batch` dealt to the copies of every grid."""
    cuts = [assign(batch.records, grid.data, minibatches, seed, batch.version) for grid in placement.distinct]
    version, oldest = batch.version, batch.min_version
    return plan_step(cuts, placement, version=version, min_version=oldest, minibatches=minibatches, master=master)


def plan_step(
    cuts: Sequence[Sequence[Assignment]],
    placement: Placement,
    *,
    version: int,
    min_version: int,
    minibatches: int,
    master: int = 0,
) -> list[BeginStep]:
    """The request to each ModelWorker, by index.

    Args:
        cuts: for each grid of `placement.distinct` how its copies are dealt the batch, all in the same order.
    """
    grids, (received, *_) = placement.distinct, cuts
    copies = {grid: grid.data_heads for grid in grids}  # each look at it would make it anew
    sources = [copies[grids[0]][entry.src] for entry in received]
    heads = [[places[entry.dst] for entry in cut] for places, cut in zip(copies.values(), cuts, strict=True)]
    leaving = _by_worker(sources)
    shares = {
        (grid, worker): GridShare(
            tuple(received[row].rollout_id for row in rows),
            tuple(received[row].minibatch for row in rows),
            tuple(sources[row] for row in rows),
            tuple(tuple(of_grid[row] for row in rows) for of_grid in heads),
        )
        for grid, of_grid in zip(grids, heads, strict=True)
        for worker, rows in _by_worker(of_grid, copies[grid]).items()
    }
    return [
        BeginStep(
            version=version,
            min_version=min_version,
            num_minibatches=minibatches,
            leaving=tuple(received[row].rollout_id for row in leaving.get(worker, ())),
            targets=tuple(tuple(of_grid[row] for row in leaving.get(worker, ())) for of_grid in heads),
            shares=tuple(
                shares[grid, copies[grid][grid.coordinates(worker).data]] if worker in grid.members else None
                for grid in grids
            ),
            master=master,
        )
        for worker in range(placement.workers)
    ]


def _by_worker(workers: Sequence[int], known: Sequence[int] = ()) -> dict[int, list[int]]:
    """The rows of each worker, ascending; those `known` have an entry in any case."""
    rows: dict[int, list[int]] = {worker: [] for worker in known}
    for row, worker in enumerate(workers):
        rows.setdefault(worker, []).append(row)
    return rows
