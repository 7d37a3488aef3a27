"""Move trajectories to the ranks that train them, and columns to roles on another grid.

Trajectories
------------
The codec's bytes are sent point to point by `torch.distributed`, on the CPU. All trajectories from one rank to another
are one message, preceded by its size. All sends and receives are posted before the first is awaited, so no order of
ranks can block. The master plans which trajectory goes where; each rank gets the list of trajectories that it sends and
expects.

Columns
-------
Both grids have all samples of the step, each with its own distribution, and both count rollouts in data order. Each
copy knows which copy of the other grid has each of its rollouts. So the rows of a rollout go directly from the head of
the copy that has it to the head of the copy that wants it. That head passes them to its copy's ranks. Once per pair of
heads, the column's type and level (one row per token or per sample) are sent before the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.messages import GridShare, MoveColumns
from asyncrl.trainer.parallel.placement import WorkerGrid
from asyncrl.trainer.parallel.world import World

_LENGTH_BYTES = 8


def exchange_trajectories(
    leaving: Mapping[str, int], expected: Mapping[str, int], held: Mapping[str, Trajectory], ranks: Ranks
) -> list[Trajectory]:
    """Exchange trajectories and return the `expected` ones, in that order. Called by all ranks, with one plan.

    Args:
        leaving: the worker that each rollout received here goes to (possibly this one), by rollout id, in data order.
        expected: the worker that received each rollout wanted here (possibly this one), by rollout id, in data order.
        held: the trajectories on this rank, by rollout id.
        ranks: all workers.

    Raises:
        KeyError: this rank lacks a rollout that it should hold.
    """
    for rollout_id in leaving:
        if rollout_id not in held:
            raise KeyError(f"rank {ranks.rank} should hold rollout {rollout_id!r} but does not")
    mine = {rollout_id: held[rollout_id] for rollout_id, target in leaving.items() if target == ranks.rank}
    mine |= {each.rollout_id: each for each in _arriving(leaving, expected, held, ranks)}
    return [mine[rollout_id] for rollout_id in expected]


def hand_down(trajectories: Sequence[Trajectory], copy: Ranks) -> list[Trajectory]:
    """Copy the trajectories of the leading rank of `copy` to all its ranks, and return them. Called by all of them."""
    if copy.world == 1:
        return list(trajectories)
    message = _pack(trajectories) if copy.leads else torch.empty(0, dtype=torch.uint8)
    size = int(copy.broadcast(torch.tensor([len(message)])))
    received = copy.broadcast(message if copy.leads else torch.empty(size, dtype=torch.uint8))
    return list(trajectories) if copy.leads else _unpack(received)


def _arriving(
    leaving: Mapping[str, int], expected: Mapping[str, int], held: Mapping[str, Trajectory], ranks: Ranks
) -> list[Trajectory]:
    going: dict[int, list[Trajectory]] = {}
    for rollout_id, target in leaving.items():
        if target != ranks.rank:
            going.setdefault(target, []).append(held[rollout_id])
    sources = set(expected.values()) - {ranks.rank}
    outgoing = {target: _pack(trajectories) for target, trajectories in sorted(going.items())}
    sizes = {source: torch.zeros(1, dtype=torch.int64) for source in sorted(sources)}
    transfer({target: torch.tensor([len(data)]) for target, data in outgoing.items()}, sizes, ranks)
    incoming = {source: torch.zeros(int(size), dtype=torch.uint8) for source, size in sizes.items()}
    transfer(outgoing, incoming, ranks)
    return [trajectory for source in sizes for trajectory in _unpack(incoming[source])]


def transfer(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], ranks: Ranks) -> None:
    """Send and receive one tensor per peer."""
    pending = [ranks.receive(tensor, src) for src, tensor in incoming.items()]
    pending += [ranks.send(tensor, dst) for dst, tensor in outgoing.items()]
    for work in pending:
        work.wait()


def _pack(trajectories: Iterable[Trajectory]) -> Tensor:
    """Encode trajectories as one message: the length of its header (int64), the header, the payload."""
    header, payload = encode_trajectories(trajectories)
    data = bytearray().join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, payload))
    return torch.frombuffer(data, dtype=torch.uint8)


def _unpack(data: Tensor) -> list[Trajectory]:
    view = memoryview(data.numpy().data)
    start = _LENGTH_BYTES
    end = start + int.from_bytes(view[:start], "little")
    return decode_trajectories([view[start:end], view[end:]])


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
            batch, place = batches[target], world.places[target]
            batch[key] = _hand_down_column(arrived, batch, place.copy).to(batch.device)


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
    if column is not None and world.places[source].copy.leads:
        for at, worker in enumerate(shares[source].heads[grids_of_all.index(target)]):
            sends.setdefault(worker, []).append(_rows(column, batches[source], at, key))
    if target in batches and world.places[target].copy.leads:
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
