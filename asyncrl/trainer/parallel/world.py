"""Join the `torch.distributed` world of the training ranks, and find this rank's position in each role's grid.

The ranks find each other through name resolution and meet in a file of the run's folder, so the rendezvous needs no
port. Gloo carries tensors on the CPU (small collectives, trajectories), NCCL tensors on GPUs.

`training_world` joins the ranks and lays out each grid as a DeviceMesh. `RankPosition` is the position of this rank in
one grid, `World` has all of its positions. Worker index, rank and data index may differ (`placement`): ask
`RankPosition` which rank takes trajectories, which one publishes, and over which ranks to sum.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.names import ACTOR, TRAINING_WORLD_KEY
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import MEETING_PREFIX
from asyncrl.models.ranks import Ranks
from asyncrl.runtime.process.hardware import interface_of
from asyncrl.trainer.engines import ENGINES
from asyncrl.trainer.parallel.placement import Coordinates, Placement, WorkerGrid, engine_of
from asyncrl.trainer.parallel.process_groups import Collectives

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
        places: this worker's position, by grid; only the grids that it is in.
        rank_hosts: addresses of the ranks' hosts.
    """

    worker: int = 0
    placement: Placement = field(default_factory=lambda: Placement({ACTOR: WorkerGrid()}))
    everyone: Ranks = field(default_factory=Ranks)
    places: Mapping[WorkerGrid, RankPosition] = field(default_factory=lambda: {WorkerGrid(): RankPosition()})
    rank_hosts: tuple[str, ...] = ("",)

    def hosts(self, role: str) -> bool:
        """True if this worker holds a part of `role`."""
        return self.placement.grid(role) in self.places

    def place(self, role: str) -> RankPosition:
        """Return this worker's position in the grid of `role`.

        Raises:
            KeyError: this worker has no part of the role.
        """
        return self.places[self.placement.grid(role)]

    @property
    def takes_trajectories(self) -> bool:
        """True if this rank receives trajectories, for its data-parallel copy of the actor."""
        return self.worker in self.placement.actor.data_heads

    @property
    def publishes(self) -> bool:
        """True if this rank completes published weights and sends them from its memory."""
        return self.worker == self.placement.actor.publisher


@contextmanager
def training_world(
    config: ExperimentConfig,
    worker: int,
    placement: Placement,
    device: torch.device,
    run_dir: Path,
    resolver: NameResolver,
    collectives: Collectives | None = None,
    *,
    start_s: float = 0.0,
) -> Iterator[World]:
    """Join all grids of `placement` as `worker`, and leave at the end of the block.

    A single rank makes no world unless it uses the sharded engine. Gloo uses the interface with the address
    `system.host`. The first rank's entry has a lease, so that a later run of the same trial does not use an old file.

    Args:
        collectives: lets another thread abort the collectives; None if no thread does.
        start_s: time limit of a collective until `all_have_started`, if larger than `trainer.collective_timeout_s`:
            one rank may load for a long time while the others wait.

    Raises:
        NameResolveTimeout: the first rank did not appear within `system.start_timeout_s`. A ModelWorker waits for the
            first rank earlier (`ModelWorker._meet`).
    """
    if device.type == "cuda":  # else DeviceMesh and NCCL choose a GPU by the rank's number, but each rank sees one GPU
        torch.cuda.set_device(device.index or 0)
    if placement.workers == 1 and not ENGINES[engine_of(config)].in_parts:
        yield World()
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(config.system.host))
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # no connections are made after the groups exist
    if worker == 0:
        meeting = run_dir / f"{MEETING_PREFIX}{secrets.token_hex(16)}"
        resolver.add(TRAINING_WORLD_KEY, str(meeting), lease_s=config.system.lease_s, replace=True)
    else:
        meeting = Path(resolver.wait(TRAINING_WORLD_KEY, config.system.start_timeout_s))
    timeout = timedelta(seconds=max(config.trainer.collective_timeout_s, start_s))
    collectives = collectives or Collectives()
    places: dict[WorkerGrid, RankPosition] = {}
    try:
        with collectives.making(device):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.FileStore(str(meeting), placement.workers),  # type: ignore[attr-defined]  # public, but missing in the stubs
                rank=worker,
                world_size=placement.workers,
                timeout=timeout,
            )
            # NCCL connects and fails now, not in the first step. Binding the group to the device (`device_id`) would do
            # so too, but makes every later group a split of this one, also those with servers of the weight transport.
            dist.all_reduce(torch.zeros(1, device=device))
            groups = _Groups(worker, placement.workers, timeout)
            for grid in placement.distinct:
                if (place := _lay_out(worker, grid, groups, device)) is not None:
                    places[grid] = place
            everyone = Ranks(worker, placement.workers)
            hosts = tuple(host.decode() for host in everyone.all_gather_bytes(config.system.host.encode()))
        yield World(worker, placement, everyone, places, hosts)
    finally:
        for place in places.values():  # torch's caches keep meshes alive, and meshes the threads of their groups
            if place.mesh is not None:
                place.mesh._pg_registry.clear()
        collectives.leave()
        meeting.unlink(missing_ok=True)  # after torch's store, which recreates the file if another rank was first


def all_have_started(config: ExperimentConfig) -> None:
    """From now on a rank waits for a peer in a collective for `trainer.collective_timeout_s` only."""
    timeout = timedelta(seconds=config.trainer.collective_timeout_s)
    for group in list(_world.pg_map):
        _set_pg_timeout(timeout, group)


class _Groups:
    """The process groups of this rank, one for each set of ranks.

    With gloo a group costs threads and connections, with NCCL memory of the GPU. The thread that trains begins all
    collectives, in the same order on all ranks, so a set of ranks needs one group for all purposes.

    Attributes:
        alone: group of only this rank.
    """

    def __init__(self, worker: int, workers: int, timeout: timedelta) -> None:
        self.alone = dist.new_group([worker], timeout=timeout, use_local_synchronization=True)
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(workers)): dist.group.WORLD}

    def own(self, lists: list[list[int]], *, shared: bool = True) -> dist.ProcessGroup | None:
        """Return the group of the list with this rank; None if this rank is alone or in no list. All ranks call this
        with the same `lists`, because all must make each group.

        Args:
            shared: False makes a dedicated group, for tensors that are sent in a separate order.
        """
        find = self._shared if shared else self._new
        found = [find(tuple(members)) for members in lists if len(members) > 1]
        return next((group for group in found if group is not None), None)

    def _shared(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        if members not in self._made:
            self._made[members] = self._new(members)
        return self._made[members]

    def _new(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        made = dist.new_group(list(members), timeout=self._timeout)
        return None if made is dist.GroupMember.NON_GROUP_MEMBER else made


def _lay_out(worker: int, grid: WorkerGrid, groups: _Groups, device: torch.device) -> RankPosition | None:
    """Return this rank's place in `grid`, or None for a rank outside it. All ranks call this."""
    workers = torch.tensor(grid.members).view(grid.pipeline, grid.data, grid.context, grid.tensor)
    replicas = workers.view(grid.pipeline, grid.replicas, grid.shards, grid.tensor)
    axes = [groups.own(_lines(replicas, axis)) for axis in range(len(MESH_AXES))]
    pipelines = _lines(workers, 0)
    data = groups.own(_lines(workers, 1))
    context = groups.own(_lines(workers, 2))
    everyone = groups.own([workers.flatten().tolist()])
    copy = groups.own([copy.flatten().tolist() for copy in workers.unbind(1)])
    backwards = groups.own(pipelines, shared=False)
    ends = groups.own([[stages[0], stages[-1]] for stages in pipelines if len(stages) > 1])
    if worker not in grid.members:
        return None
    mesh = DeviceMesh.from_group(
        [groups.alone if axis is None else axis for axis in axes], device.type, replicas, mesh_dim_names=MESH_AXES
    )
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    pipeline, replica, shard, tensor = coordinates
    copy_index, part = divmod(replica * grid.shards + shard, grid.context)
    assert Coordinates(pipeline, copy_index, tensor, part) == grid.coordinates(worker), (coordinates, worker, grid)
    return RankPosition(
        worker, grid, _ranks(everyone), _ranks(data), _ranks(copy), _ranks(context), mesh, backwards, ends
    )


def _lines(workers: torch.Tensor, axis: int) -> list[list[int]]:
    """Return the workers that differ only in their place on `axis`, for each place on the other axes."""
    lines: list[list[int]] = workers.movedim(axis, -1).flatten(0, -2).tolist()
    return lines


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of `group`, to which this rank belongs; None stands for a rank that is alone."""
    return Ranks() if group is None else Ranks(dist.get_rank(group), dist.get_world_size(group), group)
