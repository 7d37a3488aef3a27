"""A rank is got out of any collective by another thread of its own, whatever its peers do."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
import torch
import torch.distributed as dist

from asyncrl.comm.name_resolve import make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid
from asyncrl.trainer.parallel.process_groups import Collectives, training_world
from asyncrl.trainer.parallel.world import World

LIMIT_S = 300.0
Begin = Callable[[dist.ProcessGroup], dist.Work | None]


def groups_of(world: World) -> dict[str, dist.ProcessGroup]:
    """All groups of this rank in which it is not alone."""
    position = world.position("actor")
    assert position.mesh is not None
    found = {f"mesh/{axis}": position.mesh.get_group(axis) for axis in position.mesh.mesh_dim_names or ()}
    own = {"everyone": position.everyone.group, "data": position.data.group, "copy": position.copy.group}
    own |= {"world": dist.group.WORLD, "backwards": position.backwards, "ends": position.ends}
    found |= {name: group for name, group in own.items() if group is not None}
    return {name: group for name, group in found.items() if dist.get_world_size(group) > 1}


def all_reduce(group: dist.ProcessGroup) -> dist.Work | None:
    return dist.all_reduce(torch.ones(4), group=group, async_op=True)


def receive(group: dist.ProcessGroup) -> dist.Work | None:
    return dist.irecv(torch.ones(4), group=group, group_src=1 - min(1, dist.get_rank(group)))


def send(group: dist.ProcessGroup) -> dist.Work | None:
    much = torch.ones(16 << 20)  # more than the kernel takes off its hands
    return dist.isend(much, group=group, group_dst=1 - min(1, dist.get_rank(group)))


OPERATIONS: Mapping[str, Begin] = {"all_reduce": all_reduce, "receive": receive, "send": send}


Reported: TypeAlias = "Queue[dict[str, str]]"


def outcome_of(wait: Callable[[], object]) -> str:
    try:
        wait()
    except RuntimeError as error:
        return "timed out" if "Timed out" in str(error) else "failed"
    return "passed"


def be_rank(worker: int, grid: WorkerGrid, operation: str, folder: Path, reported: Reported, over: Event) -> None:
    """Rank 0 begins the operation in each of its groups, to which nobody else comes, and aborts; what came of each."""
    torch.set_num_threads(1)
    collectives, names = Collectives(), make_resolver("file", str(folder / "names"))
    placed = Placement({"actor": grid})
    with training_world(ExperimentConfig(), worker, placed, torch.device("cpu"), folder, names, collectives) as world:
        if worker:
            over.wait(LIMIT_S)
            return
        groups = groups_of(world)
        begun = {name: OPERATIONS[operation](group) for name, group in groups.items()}
        collectives.abort()
        outcomes = {name: outcome_of(work.wait) for name, work in begun.items() if work is not None}
        outcomes["later"] = outcome_of(lambda: dist.all_reduce(torch.ones(4)))
        reported.put(outcomes)
    over.set()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("grid", "names"),
    [
        (WorkerGrid(data=2), {"mesh/shard", "everyone", "data", "world"}),
        (WorkerGrid(pipeline=2, data=2), {"mesh/pipeline", "mesh/shard", "backwards", "ends", "copy", "world"}),
    ],
    ids=["data", "pipeline"],
)
def test_an_abort_ends_what_is_under_way_in_every_group(
    grid: WorkerGrid, names: set[str], operation: str, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")  # which has torch loaded already
    reported: Reported = context.Queue()
    over = context.Event()
    ranks = [
        context.Process(target=be_rank, args=(worker, grid, operation, tmp_path, reported, over))
        for worker in grid.members
    ]
    for rank in ranks:
        rank.start()
    try:
        outcomes = reported.get(timeout=LIMIT_S)
        for rank in ranks:
            rank.join(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
    assert outcomes.keys() > names
    assert set(outcomes.values()) == {"failed"}, outcomes
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks)


def test_what_is_aborted_while_groups_are_made_ends_their_connections_and_nothing_else() -> None:
    collectives = Collectives()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = socket.create_connection(listening.getsockname())
        with collectives.making(torch.device("cpu")):
            collectives.abort()
            ours = socket.create_connection(listening.getsockname())
            also_made = socket.create_server(("127.0.0.1", 0))
        collectives.abort()
        collectives.leave()
        kept, ended = (listening.accept()[0] for _ in range(2))
        kept.sendall(b"still there")
        assert before.recv(100) == b"still there"
        assert ours.recv(1) == ended.recv(1) == b"", "both ends are shut down"
        with socket.create_connection(listening.getsockname()):  # what listened before still does
            pass
        for each in (before, ours, also_made, kept, ended):
            each.close()


def test_once_its_groups_are_made_gloo_takes_no_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep each of their connections for the life of the process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    collectives = Collectives()
    with collectives.making(torch.device("cpu")):
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
        dist.new_group([0])
        ports = listening_ports()
        assert len(ports) == 2
        early = [socket.create_connection(("127.0.0.1", port), 60.0) for port in ports]
    try:
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.2)
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [1.0] * 4
    finally:
        collectives.leave()
        for each in early:
            each.close()


def test_a_socket_that_has_closed_by_the_time_it_is_looked_at_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As short-lived ones of gloo and its store do; their descriptors may be others' by then."""
    with socket.create_server(("127.0.0.1", 0)) as others:
        closed = socket.create_server(("127.0.0.1", 0))
        seen = {closed.fileno(): os.fstat(closed.fileno()).st_ino, others.fileno(): 1}
        closed.close()
        looks = iter([{}, seen])
        monkeypatch.setattr("asyncrl.trainer.parallel.process_groups._sockets", lambda: next(looks))
        with Collectives().making(torch.device("cpu")):
            pass
        with socket.create_connection(others.getsockname(), LIMIT_S):
            pass


def listening_ports() -> list[int]:
    """Ports on which this process takes TCP connections."""
    connections = psutil.Process().net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
