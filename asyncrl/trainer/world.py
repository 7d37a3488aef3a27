"""Joining the `torch.distributed` world of the training ranks, and laying it out as a DeviceMesh.

The ranks find each other through name resolution and meet in a file of the run's folder, so no port is opened for it.
Gloo carries what is on the CPU (small collectives, trajectories), NCCL what is on GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from asyncrl.comm.name_resolve import NameResolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.hardware import interface_of
from asyncrl.trainer.parallel import MESH_AXES, Place, Ranks
from asyncrl.trainer.settings import TrainerEngine, engine_of
from asyncrl.trainer.worker_grid import Coordinates, WorkerGrid

WORLD_KEY = "training_world"
"""Name under which the first rank tells the others where to meet."""


@contextmanager
def training_world(
    config: ExperimentConfig, worker: int, grid: WorkerGrid, device: torch.device, run_dir: Path, resolver: NameResolver
) -> Iterator[Place]:
    """Join as `worker` of `grid`, leave at the end. One rank needs no world, but for the sharded engine.

    Gloo uses the interface that has `system.host`. The first rank's entry has a lease, so that a later run of the same
    trial does not meet in an old file.

    Raises:
        NameResolveTimeout: the first rank did not come within `system.start_timeout_s`.
    """
    if grid.workers == 1 and engine_of(config) == TrainerEngine.flat:
        yield Place()
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(config.system.host))
    if worker == 0:
        meeting = run_dir / f"training_world-{os.getpid()}-{time.time_ns()}"
        resolver.add(WORLD_KEY, str(meeting), lease_s=config.system.heartbeat_s, replace=True)
    else:
        meeting = Path(resolver.wait(WORLD_KEY, config.system.start_timeout_s))
    timeout = timedelta(seconds=config.trainer.collective_timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(meeting), grid.workers),  # type: ignore[attr-defined]  # public, but missing in the stubs
        rank=worker,
        world_size=grid.workers,
        timeout=timeout,
    )
    try:
        yield _lay_out(worker, grid, device, timeout)
    finally:
        dist.destroy_process_group()


def _lay_out(worker: int, grid: WorkerGrid, device: torch.device, timeout: timedelta) -> Place:
    """This rank's place in a mesh over the world, whose groups have the world's time limit."""
    mesh = init_device_mesh(device.type, (grid.pipeline, grid.data, grid.tensor), mesh_dim_names=MESH_AXES)
    copies = [dist.new_group(copy.flatten().tolist()) for copy in mesh.mesh.unbind(1)]
    for group in (*mesh.get_all_groups(), *copies):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            _set_pg_timeout(timeout, group)  # a mesh gives its groups torch's default of half an hour
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    assert Coordinates(*coordinates) == grid.coordinates(worker), (coordinates, worker, grid)
    data = Ranks(mesh.get_local_rank("data"), grid.data, mesh.get_group("data"))
    group = copies[data.rank]
    copy = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
    return Place(worker, grid, Ranks(worker, grid.workers), data, copy, mesh)
