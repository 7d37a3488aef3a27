"""Moving trajectories between ranks, from the one that received them to the one that trains them.

Bytes of the codec, over `torch.distributed` point to point on the CPU. All trajectories from one rank to another travel
as one message, preceded by its size; all sends and receives are posted before the first is waited for, so that no order
of ranks can block. Every rank works from the same assignment, so each knows what to send and to expect. Ranks are named
by their data index: the ranks of one data-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.api.trajectory import Trajectory
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.trainer.messages import Assignment
from asyncrl.trainer.parallel import Ranks

_LENGTH_BYTES = 8


def redistribute(moves: Sequence[Assignment], held: Mapping[str, Trajectory], ranks: Ranks) -> list[Trajectory]:
    """The trajectories that this rank trains, in the order of `moves`. Called by all ranks with the same `moves`.

    Args:
        held: the trajectories on this rank, by rollout id.

    Raises:
        KeyError: this rank should hold a rollout that it does not.
    """
    for move in moves:
        if move.src == ranks.rank and move.rollout_id not in held:
            raise KeyError(f"rank {ranks.rank} should hold rollout {move.rollout_id!r} but does not")
    mine = {move.rollout_id: held[move.rollout_id] for move in moves if move.src == move.dst == ranks.rank}
    if ranks.world > 1:
        mine |= {trajectory.rollout_id: trajectory for trajectory in _exchange(moves, held, ranks)}
    return [mine[move.rollout_id] for move in moves if move.dst == ranks.rank]


def _exchange(moves: Sequence[Assignment], held: Mapping[str, Trajectory], ranks: Ranks) -> list[Trajectory]:
    leaving: dict[int, list[Trajectory]] = {}
    for move in moves:
        if move.src == ranks.rank and move.dst != ranks.rank:
            leaving.setdefault(move.dst, []).append(held[move.rollout_id])
    outgoing = {dst: _pack(leaving[dst]) for dst in sorted(leaving)}
    sources = sorted({move.src for move in moves if move.dst == ranks.rank and move.src != ranks.rank})
    sizes = {src: torch.zeros(1, dtype=torch.int64) for src in sources}
    _transfer({dst: torch.tensor([len(data)]) for dst, data in outgoing.items()}, sizes, ranks)
    incoming = {src: torch.zeros(int(size), dtype=torch.uint8) for src, size in sizes.items()}
    _transfer(outgoing, incoming, ranks)
    return [trajectory for src in sources for trajectory in _unpack(incoming[src])]


def _transfer(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], ranks: Ranks) -> None:
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
