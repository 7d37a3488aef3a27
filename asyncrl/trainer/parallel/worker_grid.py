"""Assignment of roles, trajectories and publishing to ModelWorkers. Torch-free.

The ranks of a role form a grid of pipeline stages x data-parallel copies x parts of the tokens x tensor slices,
numbered row by row: the pipeline is the outermost axis, the tensor slices of one layer are neighbours, as
`torch.distributed.init_device_mesh` numbers its ranks. With 2 stages, 2 copies and 2 slices:

                      data 0              data 1
                  tensor 0  tensor 1  tensor 0  tensor 1
    pipeline 0        0         1         2         3
    pipeline 1        4         5         6         7

The actor's grid begins at worker 0, so there a worker's index is its rank. Its data index, by which trajectories are
distributed, differs as soon as there is more than one slice or stage: workers 0 and 2 above are the data heads of
copies 0 and 1.

Another role has a separate grid (`Placement`), on the actor's ranks or on separate workers. An actor at d2t2 on workers
0 to 3, the reference model at t2 on the same ranks, a critic at d2 on separate ranks:

    worker     0             1             2             3             4             5
    actor      dp0.tp0.pp0   dp0.tp1.pp0   dp1.tp0.pp0   dp1.tp1.pp0
    ref        dp0.tp0.pp0   dp0.tp1.pp0
    critic                                                             dp0.tp0.pp0   dp1.tp0.pp0

Trajectories always arrive at the actor's data heads, here workers 0 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.comm.names import ACTOR
from asyncrl.trainer.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A worker's place on each axis, from 0."""

    pipeline: int
    data: int
    tensor: int
    context: int = 0

    def __str__(self) -> str:
        context = f".cp{self.context}" if self.context else ""
        return f"dp{self.data}{context}.tp{self.tensor}.pp{self.pipeline}"


@dataclass(frozen=True, slots=True)
class WorkerGrid(Layout):
    """A layout on consecutive workers; `first` is the worker at the origin.

    Raises:
        ValueError: as for `Layout`, or `first` is negative.
    """

    first: int = 0

    def __post_init__(self) -> None:
        Layout.__post_init__(self)
        if self.first < 0:
            raise ValueError(f"{self!r} begins before worker 0")

    @classmethod
    def of(cls, layout: Layout, first: int = 0) -> WorkerGrid:
        """Return `layout` on the workers from `first` on."""
        return cls(layout.data, layout.tensor, layout.pipeline, layout.replicas, layout.context, first)

    @property
    def layout(self) -> Layout:
        """The sizes of the axes, without the workers."""
        return Layout(self.data, self.tensor, self.pipeline, self.replicas, self.context)

    @property
    def workers(self) -> int:
        """Number of ModelWorkers of the grid."""
        return self.ranks

    @property
    def members(self) -> range:
        """Indices of the grid's workers."""
        return range(self.first, self.first + self.ranks)

    def worker_at(self, coordinates: Coordinates) -> int:
        """Return the index of the worker at `coordinates`."""
        copy = coordinates.pipeline * self.data + coordinates.data
        return self.first + (copy * self.context + coordinates.context) * self.tensor + coordinates.tensor

    def coordinates(self, worker: int) -> Coordinates:
        """Return the coordinates of `worker` in the grid.

        Raises:
            ValueError: it is not in the grid.
        """
        if worker not in self.members:
            raise ValueError(f"worker {worker} is not one of the {self.workers} of {self!r}")
        rest, tensor = divmod(worker - self.first, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor, context)

    @property
    def data_heads(self) -> tuple[int, ...]:
        """The first worker of each data-parallel copy, by data index; the actor's take the trajectories."""
        return tuple(self.worker_at(Coordinates(0, data, 0)) for data in range(self.data))

    @property
    def publisher(self) -> int:
        """The worker that completes published weights and checkpoints, and sends weights from its memory."""
        return self.worker_at(Coordinates(0, 0, 0))


@dataclass(frozen=True, slots=True)
class Placement:
    """Every role's grid: the only mapping from roles to workers.

    Attributes:
        grids: grid of each role, the actor included.

    Raises:
        ValueError: there is no actor, or a worker between the first and the last hosts nothing.
    """

    grids: Mapping[str, WorkerGrid]

    def __post_init__(self) -> None:
        if ACTOR not in self.grids:
            raise ValueError(f"a placement of {', '.join(self.grids) or 'no role'} has no {ACTOR}")
        hosting = {worker for grid in self.grids.values() for worker in grid.members}
        if idle := sorted(set(range(self.workers)) - hosting):
            raise ValueError(f"worker {idle[0]} hosts no role")

    @property
    def actor(self) -> WorkerGrid:
        """The actor's grid: its data heads take trajectories, its publisher publishes."""
        return self.grids[ACTOR]

    def grid(self, role: str) -> WorkerGrid:
        """Return the grid of `role`; the actor's if the role has no separate one."""
        return self.grids.get(role, self.actor)

    @property
    def distinct(self) -> tuple[WorkerGrid, ...]:
        """All grids, each once, the actor's first."""
        return tuple(dict.fromkeys((self.actor, *self.grids.values())))

    @property
    def workers(self) -> int:
        """Number of ModelWorkers of the run."""
        return max(grid.members.stop for grid in self.grids.values())

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, the actor among them."""
        return tuple(self.grids)

    @property
    def members(self) -> dict[str, list[int]]:
        """The workers that host each role, in ascending order."""
        return {role: list(grid.members) for role, grid in self.grids.items()}

    def shards_of(self, worker: int) -> dict[str, Coordinates]:
        """Return the roles that `worker` hosts, with its place in the grid of each."""
        return {role: grid.coordinates(worker) for role, grid in self.grids.items() if worker in grid.members}
