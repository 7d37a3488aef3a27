"""This rank's position in each role's grid.

`RankPosition` is the position in one grid, `World` has all of its positions. Worker index, rank and data index may
differ (`placement`): ask `RankPosition` which rank takes trajectories, which one publishes, and over which ranks to
sum. Several ranks join in `process_groups.training_world`; a rank that is alone is `World()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.ranks import Ranks
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.parallel.placement import Coordinates, Placement, WorkerGrid, engine_of

MESH_AXES = ("pipeline", "replica", "shard", "tensor")
"""Names of the mesh's dimensions, outermost first. The weights are sharded over data-parallel copies and parts of the
tokens: with c parts, shard s is part s % c of the copy s // c of its replica.
"""


@dataclass(frozen=True)
class RankPosition:
    """Position of a ModelWorker in a grid; by default it is alone.

    Attributes:
        everyone: the grid's ranks, in the order of their workers; its leader is the grid's publisher.
        data: the ranks with the same part of the model and other samples, numbered by data index.
        copy: the ranks that together have one whole model, and the same samples; its leader takes trajectories.
        context: the ranks with the same part of the model and the same samples, each with another part of the tokens.
        mesh: device mesh of the grid's ranks, with the axes `MESH_AXES`; None for a rank that is alone.
        backwards: this rank's pipeline, for tensors sent against the stages' order; None if there is one stage.
        ends: first and last stage of this rank's pipeline, if there are several and this rank has one of the two.
    """

    worker: int = 0
    grid: WorkerGrid = field(default_factory=WorkerGrid)
    everyone: Ranks = field(default_factory=Ranks)
    data: Ranks = field(default_factory=Ranks)
    copy: Ranks = field(default_factory=Ranks)
    context: Ranks = field(default_factory=Ranks)
    mesh: DeviceMesh | None = None
    backwards: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place on each axis."""
        return self.grid.coordinates(self.worker)


@dataclass(frozen=True)
class World:
    """All ModelWorkers, and the position of this one in each role's grid; by default it is alone.

    Attributes:
        everyone: all ranks, numbered by worker index.
        positions: this worker's position, by grid; only the grids that it is in.
        rank_hosts: addresses of the ranks' hosts.
    """

    worker: int = 0
    placement: Placement = field(default_factory=lambda: Placement({ACTOR: WorkerGrid()}))
    everyone: Ranks = field(default_factory=Ranks)
    positions: Mapping[WorkerGrid, RankPosition] = field(default_factory=lambda: {WorkerGrid(): RankPosition()})
    rank_hosts: tuple[str, ...] = ("",)

    def hosts(self, role: str) -> bool:
        """True if this worker holds a part of `role`."""
        return self.placement.grid(role) in self.positions

    def position(self, role: str) -> RankPosition:
        """Return this worker's position in the grid of `role`.

        Raises:
            KeyError: this worker has no part of the role.
        """
        return self.positions[self.placement.grid(role)]

    @property
    def takes_trajectories(self) -> bool:
        """True if this rank receives trajectories, for its data-parallel copy of the actor."""
        return self.worker in self.placement.actor.data_heads

    @property
    def publishes(self) -> bool:
        """True if this rank completes published weights and sends them from its memory."""
        return self.worker == self.placement.actor.publisher


def is_alone(config: ExperimentConfig, placement: Placement) -> bool:
    """True if there is one rank, which needs no process groups; the sharded engine always has them."""
    return placement.workers == 1 and not ENGINES[engine_of(config)].in_parts
