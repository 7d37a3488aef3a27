"""Routing of calls: names of model shards and data slots, and the workers that host them.

A shard is one rank's part of one role, written `actor@dp0.tp0.pp0`. A rank that computes another part of the tokens
than the first (`c` in a layout) has `cp` in its name too: `actor@dp0.cp1.tp0.pp0`. One worker may host shards of
several roles (the actor and the reference model of one device, say); one shard has one worker. `__data0__`,
`__data1__`, ... name the workers that hold trajectories: slot i is data-parallel head i.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product


class RoutingError(ValueError):
    """A worker index is negative, or a role's grid has a hole."""


@dataclass(frozen=True, slots=True, order=True)
class ModelShardID:
    """Shard of `role` at data-, tensor-, pipeline- and context-parallel coordinates."""

    role: str
    dp: int
    tp: int = 0
    pp: int = 0
    cp: int = 0

    def __str__(self) -> str:
        context = f".cp{self.cp}" if self.cp else ""
        return f"{self.role}@dp{self.dp}{context}.tp{self.tp}.pp{self.pp}"


class RoutingTable:
    """Worker indices of shards and data slots.

    Args:
        shards: the worker of every shard. A role's shards must fill a whole dp x tp x pp x cp grid.
        data_workers: the worker of data slot `__data{i}__` at position i.

    Attributes:
        shards: as given.
        data_workers: as given.
        placement: for each role, the workers that host its shards, in ascending order.

    Raises:
        RoutingError: a worker index is negative, or a role's grid has a hole.
    """

    def __init__(self, shards: Mapping[ModelShardID, int], data_workers: Sequence[int]) -> None:
        self.shards = dict(shards)
        self.data_workers = tuple(data_workers)
        for name, worker in [*shards.items(), *((f"__data{i}__", w) for i, w in enumerate(data_workers))]:
            if worker < 0:
                raise RoutingError(f"{name} is routed to worker {worker}: worker indices are at least 0")
        self.placement: dict[str, list[int]] = {}
        for role in sorted({shard.role for shard in shards}):
            hosted = {shard: worker for shard, worker in shards.items() if shard.role == role}
            _check_grid(role, hosted.keys())
            self.placement[role] = sorted(set(hosted.values()))


def _check_grid(role: str, shards: Collection[ModelShardID]) -> None:
    dp, tp, pp, cp = (1 + max(axis) for axis in zip(*((s.dp, s.tp, s.pp, s.cp) for s in shards), strict=True))
    for coordinates in product(range(dp), range(tp), range(pp), range(cp)):
        if (shard := ModelShardID(role, *coordinates)) not in shards:
            spans = f"dp{dp} tp{tp} pp{pp}" + (f" cp{cp}" if cp > 1 else "")
            raise RoutingError(f"shard {shard} is hosted by no worker, but role {role!r} spans {spans}")
