"""Join the `torch.distributed` world of several training ranks, lay out their grids, and abort their collectives.

The ranks find each other through name resolution and meet in a file of the run's folder, so the rendezvous needs no
port. Gloo carries tensors on the CPU (small collectives, trajectories), NCCL tensors on GPUs. Each grid is a DeviceMesh
(`training_world`).

Aborting
--------
A rank that waits for a peer is in native code: no signal handler runs and no exception arrives until the peer answers
or `trainer.collective_timeout_s` is over. To stop such a rank, another thread ends the collective:

- NCCL aborts its communicators (`torch.distributed.distributed_c10d._abort_process_group`).
- gloo has no way to abort. In torch 2.13 `abort` and `shutdown` of a group, of its backend, and of all groups return at
  once and do nothing; the rank keeps waiting. But a collective fails at once when a connection ends, as it does when a
  peer dies. So this process's ends of gloo's connections are shut down here.

After that every collective fails, here and at the peers, so this is for a process that is about to exit.

gloo also keeps listening as long as its groups exist, and accepts every connection. Torch 2.13 cannot turn that off,
and closing a listener ends the process. All ranks are connected once the groups exist. From then on a socket filter on
the listeners makes the kernel drop attempts to connect.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout, _world

from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.names import TRAINING_WORLD_KEY
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import MEETING_PREFIX
from asyncrl.models.ranks import Ranks
from asyncrl.runtime.process.hardware import interface_of
from asyncrl.trainer.parallel.placement import Coordinates, Placement, WorkerGrid
from asyncrl.trainer.parallel.world import MESH_AXES, RankPosition, World, is_alone

_DESCRIPTORS = "/proc/self/fd"
"""Directory in which Linux lists this process's open descriptors. On other systems gloo is not aborted."""
_SO_ATTACH_FILTER = 26
"""Linux's number; Python has no name for it."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A BPF program of one instruction: keep 0 bytes of each packet."""


class Collectives:
    """Makes, aborts and leaves the process groups. One per process; any thread may abort."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, int] = {}
        self._device = torch.device("cpu")
        self._aborted = False

    @contextmanager
    def making(self, device: torch.device) -> Iterator[None]:
        """Make groups for tensors on `device` within this block; gloo connects each group to all its ranks at once.

        Nothing else in this process may start to listen within the block: on CPUs, sockets that listen when it ends
        accept no more connections.
        """
        before = _sockets()
        try:
            yield
        finally:
            with self._lock:
                self._device = device
                self._made = dict(_sockets().items() - before.items())
                if self._aborted:
                    self._shut_down()
        if device.type == "cpu":  # on GPUs, groups may include NCCL, which also connects later
            for descriptor, number in self._made.items():
                _take_no_more(descriptor, number)

    def abort(self) -> None:
        """Make every running and later collective of this process fail."""
        with self._lock:
            if not self._aborted:
                self._aborted = True
                self._shut_down()

    def all_have_started(self, timeout_s: float) -> None:
        """From now on a rank waits for a peer in a collective for `timeout_s` only."""
        for group in list(_world.pg_map):
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def leave(self) -> None:
        """Dissolve all groups."""
        with self._lock:
            if dist.is_initialized():  # NCCL's abort has dissolved them
                dist.destroy_process_group()

    def _shut_down(self) -> None:
        for descriptor, number in self._made.items():
            with suppress(OSError):  # the socket is not connected
                _end_connection(descriptor, number)
        if self._device.type == "cuda" and dist.is_initialized():
            _abort_process_group()


def _sockets() -> dict[int, int]:
    """Return the kernel's number of each socket of this process, by descriptor. Only descriptors are reused."""
    found = {}
    with suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # the descriptor of the listing itself
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


@contextmanager
def _reopened(descriptor: int, number: int) -> Iterator[socket.socket | None]:
    """Open the TCP socket `number` at this descriptor; None if it was closed, or is not a TCP socket."""
    try:
        found = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        yield None
        return
    with found:
        same = os.fstat(found.fileno()).st_ino == number
        yield found if same and found.family in (socket.AF_INET, socket.AF_INET6) else None


def _end_connection(descriptor: int, number: int) -> None:
    """Shut down the TCP connection at this descriptor, if it still is the socket with this `number`.

    Raises:
        OSError: it is not a connection. A listener is left alone: gloo's thread would end the process.
    """
    with _reopened(descriptor, number) as connection:
        if connection is not None:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def _take_no_more(descriptor: int, number: int) -> None:
    """Make the kernel drop attempts to connect if the socket with this `number` still listens; open connections stay.

    Raises:
        OSError: the kernel does not accept the filter.
    """
    with _reopened(descriptor, number) as listener:
        if listener is None or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


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

    A rank that is alone (`is_alone`) makes no process groups. Gloo uses the interface with the address
    `system.host`. The first rank's entry has a lease, so that a later run of the same trial does not use an old file.

    Args:
        collectives: lets another thread abort the collectives; None if no thread does.
        start_s: time limit of a collective until `Collectives.all_have_started`, if it is larger than
            `trainer.collective_timeout_s`: one rank may load for a long time while the others wait.

    Raises:
        NameResolveTimeout: the first rank did not appear within `system.start_timeout_s`. A ModelWorker waits for the
            first rank earlier (`ModelWorker._meet`).
    """
    if device.type == "cuda":  # else DeviceMesh and NCCL choose a GPU by the rank's number, but each rank sees one GPU
        torch.cuda.set_device(device.index or 0)
    if is_alone(config, placement):
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
    positions: dict[WorkerGrid, RankPosition] = {}
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
                if (position := _lay_out(worker, grid, groups, device)) is not None:
                    positions[grid] = position
            everyone = Ranks(worker, placement.workers)
            hosts = tuple(host.decode() for host in everyone.all_gather_bytes(config.system.host.encode()))
        yield World(worker, placement, everyone, positions, hosts)
    finally:
        for position in positions.values():  # torch's caches keep meshes alive, and meshes the threads of their groups
            if position.mesh is not None:
                position.mesh._pg_registry.clear()
        collectives.leave()
        meeting.unlink(missing_ok=True)  # after torch's store, which recreates the file if another rank was first


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
