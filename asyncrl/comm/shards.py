"""Where a call goes: model shards and data slots by name, and the workers that host them.

A shard is one rank's part of one role, written `actor@dp0.tp0.pp0`. One worker may host shards of several roles (the
actor and the reference model of one device, say); one shard has one worker. `__data0__`, `__data1__`, ... name the
workers that hold trajectories: slot i is data-parallel head i.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SHARD = re.compile(r"(?P<role>[a-z][a-z0-9_]*)@dp(?P<dp>\d+)\.tp(?P<tp>\d+)\.pp(?P<pp>\d+)")
_DATA = re.compile(r"__data(\d+)__")


class RoutingError(ValueError):
    """A name that routes nowhere, or a table that contradicts itself."""


@dataclass(frozen=True, slots=True, order=True)
class ModelShardID:
    """Shard of `role` at data-, tensor- and pipeline-parallel coordinates.

    Raises:
        RoutingError: the role is not a lower-case identifier, or a coordinate is negative.
    """

    role: str
    dp: int
    tp: int = 0
    pp: int = 0

    def __post_init__(self) -> None:
        if not _SHARD.fullmatch(str(self)):
            raise RoutingError(f"shard {str(self)!r} is not valid: use <role>@dp<i>.tp<i>.pp<i>, role like 'actor'")

    def __str__(self) -> str:
        return f"{self.role}@dp{self.dp}.tp{self.tp}.pp{self.pp}"

    @classmethod
    def parse(cls, text: str) -> ModelShardID:
        """The shard written `text`.

        Raises:
            RoutingError: it is none.
        """
        match = _SHARD.fullmatch(text)
        if match is None:
            raise RoutingError(
                f"shard {text!r} is not valid: use <role>@dp<i>.tp<i>.pp<i>, for example 'actor@dp0.tp0.pp0'"
            )
        return cls(match["role"], int(match["dp"]), int(match["tp"]), int(match["pp"]))


def data_slot(index: int) -> str:
    """Name of data slot `index`."""
    return f"__data{index}__"


class RoutingTable:
    """Shards and data slots to worker indices.

    Args:
        shards: the worker of every shard. A role's shards must fill a whole dp x tp x pp grid.
        data_workers: the worker of data slot i at position i.

    Raises:
        RoutingError: a worker index is negative, or a role's grid has a hole.
    """

    def __init__(self, shards: Mapping[ModelShardID, int], data_workers: tuple[int, ...] = ()) -> None:
        self._shards = dict(sorted(shards.items()))
        self._data_workers = data_workers
        for name, worker in [*self._shards.items(), *((data_slot(i), w) for i, w in enumerate(data_workers))]:
            if worker < 0:
                raise RoutingError(f"{name} is routed to worker {worker}: worker indices are at least 0")
        for role in self.roles:
            self._check_grid(role)

    @property
    def roles(self) -> list[str]:
        """Roles in the table, sorted."""
        return sorted({shard.role for shard in self._shards})

    def worker_of(self, name: ModelShardID | str) -> int:
        """The worker that hosts a shard (`actor@dp0.tp0.pp0`) or data slot (`__data0__`).

        Raises:
            RoutingError: nobody does.
        """
        if isinstance(name, str) and (match := _DATA.fullmatch(name)):
            slot = int(match[1])
            if slot >= len(self._data_workers):
                raise RoutingError(f"{name} is routed nowhere: there are {len(self._data_workers)} data slots")
            return self._data_workers[slot]
        shard = ModelShardID.parse(name) if isinstance(name, str) else name
        if shard not in self._shards:
            raise RoutingError(f"shard {shard} is hosted by no worker; roles hosted: {', '.join(self.roles) or 'none'}")
        return self._shards[shard]

    def shards_of(self, role: str) -> dict[ModelShardID, int]:
        """All shards of `role` with their workers, in order of coordinates.

        Raises:
            RoutingError: nobody hosts the role.
        """
        found = {shard: worker for shard, worker in self._shards.items() if shard.role == role}
        if not found:
            raise RoutingError(f"role {role!r} is hosted by no worker; roles hosted: {', '.join(self.roles) or 'none'}")
        return found

    def dp_heads(self, role: str) -> list[int]:
        """Workers of the shards at tp 0, pp 0 of `role`, in order of dp."""
        return [worker for shard, worker in self.shards_of(role).items() if (shard.tp, shard.pp) == (0, 0)]

    def hosted_by(self, worker: int) -> list[ModelShardID]:
        """Shards that `worker` hosts."""
        return [shard for shard, host in self._shards.items() if host == worker]

    def _check_grid(self, role: str) -> None:
        shards = set(self.shards_of(role))
        dp, tp, pp = (1 + max(axis) for axis in zip(*((s.dp, s.tp, s.pp) for s in shards), strict=True))
        for shard in (ModelShardID(role, i, j, k) for i in range(dp) for j in range(tp) for k in range(pp)):
            if shard not in shards:
                raise RoutingError(
                    f"shard {shard} is hosted by no worker, but role {role!r} spans dp{dp} tp{tp} pp{pp}"
                )
