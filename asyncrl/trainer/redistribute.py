"""Moving trajectories between ranks, from the one that received them to the one that trains them.

Bytes of the codec, over `torch.distributed` point to point on the CPU. All trajectories from one rank to another travel
as one message, preceded by its size; all sends and receives are posted before the first is waited for, so that no order
of ranks can block. Every rank works from the same deals, so each knows what to send and to expect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.trainer.messages import BeginStep
from asyncrl.trainer.parallel import Ranks
from asyncrl.trainer.worker_grid import Placement, WorkerGrid

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Deal:
    """A rollout goes from the worker `source`, which received it, to `target`, the head of data index `data`."""

    rollout_id: str
    source: int
    target: int
    data: int
    minibatch: int


def deals(step: BeginStep, placement: Placement) -> dict[WorkerGrid, list[Deal]]:
    """Where each rollout of `step` goes, for every grid; in data order."""
    actor, *others = placement.distinct
    data = {actor: tuple(entry.dst for entry in step.assignment)}
    data |= dict(zip(others, step.elsewhere, strict=True))
    return {
        grid: [
            Deal(entry.rollout_id, actor.data_heads[entry.src], grid.data_heads[index], index, entry.minibatch)
            for entry, index in zip(step.assignment, indices, strict=True)
        ]
        for grid, indices in data.items()
    }


def redistribute(dealt: Sequence[Deal], held: Mapping[str, Trajectory], ranks: Ranks) -> list[Trajectory]:
    """The trajectories that come to this rank, in the order of `dealt`. Called by all ranks with the same `dealt`.

    Args:
        held: the trajectories on this rank, by rollout id.
        ranks: all workers.

    Raises:
        KeyError: this rank should hold a rollout that it does not.
    """
    for deal in dealt:
        if deal.source == ranks.rank and deal.rollout_id not in held:
            raise KeyError(f"rank {ranks.rank} should hold rollout {deal.rollout_id!r} but does not")
    mine = {deal.rollout_id: held[deal.rollout_id] for deal in dealt if deal.source == deal.target == ranks.rank}
    if ranks.world > 1:
        mine |= {trajectory.rollout_id: trajectory for trajectory in _exchange(dealt, held, ranks)}
    return [mine[deal.rollout_id] for deal in dealt if deal.target == ranks.rank]


def hand_down(trajectories: Sequence[Trajectory], copy: Ranks) -> list[Trajectory]:
    """The trajectories of the leading rank of `copy`, on all its ranks. Called by all of them."""
    if copy.world == 1:
        return list(trajectories)
    message = _pack(trajectories) if copy.leads else torch.empty(0, dtype=torch.uint8)
    size = int(copy.broadcast(torch.tensor([len(message)])))
    received = copy.broadcast(message if copy.leads else torch.empty(size, dtype=torch.uint8))
    return list(trajectories) if copy.leads else _unpack(received)


def _exchange(dealt: Sequence[Deal], held: Mapping[str, Trajectory], ranks: Ranks) -> list[Trajectory]:
    going: dict[int, list[Trajectory]] = {}
    sources = set()
    for deal in dealt:
        if deal.source == deal.target:
            continue
        if deal.source == ranks.rank:
            going.setdefault(deal.target, []).append(held[deal.rollout_id])
        if deal.target == ranks.rank:
            sources.add(deal.source)
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
    """The trajectories' message: the length of its header (int64), the header, the payload."""
    header, payload = encode_trajectories(trajectories)
    data = bytearray().join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, payload))
    return torch.frombuffer(data, dtype=torch.uint8)


def _unpack(data: Tensor) -> list[Trajectory]:
    view = memoryview(data.numpy().data)
    start = _LENGTH_BYTES
    end = start + int.from_bytes(view[:start], "little")
    return decode_trajectories([view[start:end], view[end:]])
