"""Move columns of a step's batch to roles on another grid of ranks.

Both grids have all samples of the step, each with its own distribution, and both count rollouts in data order. Each
copy knows which copy of the other grid has each of its rollouts. So the rows of a rollout go directly from the head of
the copy that has it to the head of the copy that wants it. That head passes them to its copy's ranks. Once per pair of
heads, the column's type and level (one row per token or per sample) are sent before the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.exchange import transfer
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.messages import GridShare, MoveColumns
from asyncrl.trainer.parallel.placement import WorkerGrid
from asyncrl.trainer.parallel.world import World

_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.int32)
_PER_TOKEN, _PER_SAMPLE = 0, 1

Shares = Mapping[WorkerGrid, GridShare]
"""By grid: the part of the step's batch that the master assigned to this rank's data-parallel copy."""


def move_columns(request: MoveColumns, world: World, shares: Shares, batches: Mapping[WorkerGrid, StepBatch]) -> None:
    """Copy columns from the ranks of role `request.source` to the ranks of role `request.target`.

    Called by all ranks of both grids.

    Raises:
        ValueError: a column is not a vector with one number per token or per sample.
    """
    source, target = world.placement.grid(request.source), world.placement.grid(request.target)
    for key in request.keys:
        column = batches[source][key].cpu() if source in batches else None  # all ranks compute a deferred column
        arrived = _exchange_column(key, column, (source, target), world, shares, batches)
        if target in batches:
            batch, position = batches[target], world.positions[target]
            batch[key] = _hand_down_column(arrived, batch, position.copy).to(batch.device)


def _exchange_column(
    key: str,
    column: Tensor | None,
    grids: tuple[WorkerGrid, WorkerGrid],
    world: World,
    shares: Shares,
    batches: Mapping[WorkerGrid, StepBatch],
) -> Tensor | None:
    """Return the column of this rank's batch in the target grid if this rank heads a copy of that grid; else None."""
    source, target = grids
    sends: dict[int, list[Tensor]] = {}
    wanted: dict[int, list[int]] = {}  # places of rollouts in this rank's target batch, by the head they come from
    here, grids_of_all = world.worker, world.placement.distinct
    if column is not None and world.positions[source].copy.leads:
        for at, worker in enumerate(shares[source].heads[grids_of_all.index(target)]):
            sends.setdefault(worker, []).append(_rows(column, batches[source], at, key))
    if target in batches and world.positions[target].copy.leads:
        for to, worker in enumerate(shares[target].heads[grids_of_all.index(source)]):
            wanted.setdefault(worker, []).append(to)
    kind = _header(column, batches[source], key) if column is not None else None
    outgoing = {worker: torch.cat(rows) for worker, rows in sorted(sends.items())}
    headers = {worker: torch.zeros(2, dtype=torch.int64) for worker in sorted(wanted)}
    if kind is not None and here in headers:
        headers[here] = kind
    transfer(
        {worker: kind for worker in outgoing if worker != here and kind is not None},
        {worker: header for worker, header in headers.items() if worker != here},
        world.everyone,
    )
    if not wanted:
        transfer({worker: rows for worker, rows in outgoing.items() if worker != here}, {}, world.everyone)
        return None
    batch = batches[target]
    dtype, level = (int(value) for value in next(iter(headers.values())))
    bounds = _bounds(batch, level)
    sizes = {worker: sum(int(bounds[i + 1] - bounds[i]) for i in group) for worker, group in wanted.items()}
    incoming = {worker: torch.empty(size, dtype=_DTYPES[dtype]) for worker, size in sorted(sizes.items())}
    transfer(
        {worker: rows for worker, rows in outgoing.items() if worker != here},
        {worker: rows for worker, rows in incoming.items() if worker != here},
        world.everyone,
    )
    if here in incoming:
        incoming[here] = outgoing[here]
    whole = torch.empty(int(bounds[-1]), dtype=_DTYPES[dtype])
    for worker, group in wanted.items():
        parts = torch.split(incoming[worker], [int(bounds[i + 1] - bounds[i]) for i in group])
        for index, part in zip(group, parts, strict=True):
            whole[bounds[index] : bounds[index + 1]] = part
    return whole


def _header(column: Tensor, batch: StepBatch, key: str) -> Tensor:
    if column.dim() != 1 or column.dtype not in _DTYPES:
        raise ValueError(
            f"{key!r} has shape {tuple(column.shape)} and type {column.dtype}; only vectors of numbers cross between "
            "roles of different layouts: put the roles in one layout"
        )
    if len(column) not in (batch.num_tokens, batch.num_seqs):
        raise ValueError(
            f"{key!r} has {len(column)} rows, which is neither one per token ({batch.num_tokens}) nor one per sample "
            f"({batch.num_seqs}); only these cross between roles of different layouts: put the roles in one layout"
        )
    level = _PER_TOKEN if len(column) == batch.num_tokens else _PER_SAMPLE
    return torch.tensor([_DTYPES.index(column.dtype), level])


def _bounds(batch: StepBatch, level: int) -> Tensor:
    """Return the first row of each rollout in a column of `batch`, followed by the end of the last rollout."""
    samples = torch.bincount(batch["rollouts"].cpu(), minlength=len(batch.rollout_ids))
    ends = torch.cat([samples.new_zeros(1), samples.cumsum(0)])
    if level == _PER_SAMPLE:
        return ends
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(batch.lengths_S).cumsum(0)])
    return tokens[ends]


def _rows(column: Tensor, batch: StepBatch, rollout: int, key: str) -> Tensor:
    bounds = _bounds(batch, int(_header(column, batch, key)[1]))
    return column[bounds[rollout] : bounds[rollout + 1]]


def _hand_down_column(column: Tensor | None, batch: StepBatch, copy: Ranks) -> Tensor:
    """Broadcast the column of the head of `copy` to all its ranks; an empty column if the copy has no samples."""
    if column is None and batch.num_seqs == 0:
        return torch.empty(0)
    if copy.world == 1:
        assert column is not None
        return column
    header = torch.zeros(2, dtype=torch.int64) if column is None else _header(column, batch, "a column")
    dtype, level = (int(value) for value in copy.broadcast(header))
    if column is None:
        column = torch.empty(int(_bounds(batch, level)[-1]), dtype=_DTYPES[dtype])
    return copy.broadcast(column)
