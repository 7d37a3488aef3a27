"""Move trajectories to the ranks that train them.

The codec's bytes are sent point to point by `torch.distributed`, on the CPU. All trajectories from one rank to another
are one message, preceded by its size. All sends and receives are posted before the first is awaited, so no order of
ranks can block. The master plans which trajectory goes where; each rank gets the list of trajectories that it sends and
expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.models.ranks import Ranks

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
    mine: dict[str, Trajectory] = {}
    going: dict[int, list[Trajectory]] = {}
    for rollout_id, target in leaving.items():
        if target == ranks.rank:
            mine[rollout_id] = held[rollout_id]
        else:
            going.setdefault(target, []).append(held[rollout_id])
    sources = set(expected.values()) - {ranks.rank}
    outgoing = {target: _pack(trajectories) for target, trajectories in sorted(going.items())}
    sizes = {source: torch.zeros(1, dtype=torch.int64) for source in sorted(sources)}
    transfer({target: torch.tensor([len(data)]) for target, data in outgoing.items()}, sizes, ranks)
    incoming = {source: torch.zeros(int(size), dtype=torch.uint8) for source, size in sizes.items()}
    transfer(outgoing, incoming, ranks)
    for data in incoming.values():
        mine |= {each.rollout_id: each for each in _unpack(data)}
    return [mine[rollout_id] for rollout_id in expected]


def hand_down(trajectories: Sequence[Trajectory], copy: Ranks) -> list[Trajectory]:
    """Copy the trajectories of the leading rank of `copy` to all its ranks, and return them. Called by all of them."""
    if copy.world == 1:
        return list(trajectories)
    message = _pack(trajectories) if copy.leads else torch.empty(0, dtype=torch.uint8)
    size = int(copy.broadcast(torch.tensor([len(message)])))
    received = copy.broadcast(message if copy.leads else torch.empty(size, dtype=torch.uint8))
    return list(trajectories) if copy.leads else _unpack(received)


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
