"""A world of four ranks in a grid: each knows its place, sums go over the right ranks, tensors to the right peer."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from asyncrl.comm.name_resolve import make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.models.ranks import PeerFailed, Ranks
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid
from asyncrl.trainer.parallel.process_groups import Collectives, training_world
from asyncrl.trainer.parallel.world import World

LIMIT_S = 300.0
GRID = WorkerGrid(data=2, tensor=2)


def be_rank(worker: int, folder: Path, reported: Queue[tuple[int, dict[str, object]]]) -> None:
    """Run the checks of rank `worker` and put the findings into `reported`."""
    with training_world(
        ExperimentConfig(),
        worker,
        Placement({"actor": GRID}),
        torch.device("cpu"),
        folder,
        make_resolver("file", str(folder / "names")),
        start_s=1800.0,
    ) as world:
        starting = timeouts()
        Collectives().all_have_started(ExperimentConfig().trainer.collective_timeout_s)
        position = world.position("actor")
        received = torch.zeros(1)
        peer = 1 - position.data.rank
        sent = position.data.send(torch.tensor([float(worker)]), peer)
        position.data.receive(received, peer).wait()
        sent.wait()

        def fail_on_the_last() -> None:
            if worker == 3:
                raise ValueError("mine")

        outcome = "passed"
        try:
            position.everyone.together(fail_on_the_last, "failing")
        except (PeerFailed, ValueError) as error:
            outcome = repr(error)
        assert position.mesh is not None
        found = {
            "place": [position.coordinates.pipeline, position.coordinates.data, position.coordinates.tensor],
            "mesh": [
                at for at, size in zip(position.mesh.get_coordinate() or (), (1, 1, 2, 2), strict=True) if size > 1
            ],
            "head": world.takes_trajectories,
            "publishes": world.publishes,
            "leads": position.everyone.leads,
            "data": position.data.all_reduce_sum(torch.tensor([float(worker)])).item(),
            "everyone": position.everyone.all_reduce_sum(torch.tensor([float(worker)])).item(),
            "received": received.item(),
            "outcome": outcome,
            "timeouts": [starting, timeouts()],
            "groups": len(_world.pg_map),
        }
        reported.put((worker, found))


def timeouts() -> list[float]:
    """Those of all groups, in seconds."""
    backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
    return sorted({backend.options._timeout.total_seconds() for backend in backends})


def be_in_two_worlds(folder: Path, reported: Queue[list[int]]) -> None:
    """Tell how many groups one rank has in each of two worlds, and how many threads of theirs are there afterwards."""
    config, meshes, groups = ExperimentConfig(), [], []
    config.trainer.engine = "sharded"
    for name in ("first", "second"):
        (folder / name).mkdir()
        names = make_resolver("file", str(folder / name / "names"))
        placed = Placement({"actor": WorkerGrid()})
        with training_world(config, 0, placed, torch.device("cpu"), folder / name, names) as world:
            meshes.append(world.position("actor").mesh)  # as torch's caches keep them
            groups.append(len(_world.pg_map))
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    reported.put([*groups, threads.count("gloo_tcp_loop")])


def test_a_rank_alone_has_few_groups_and_none_once_it_has_left(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    reported: Queue[list[int]] = context.Queue()
    rank = context.Process(target=be_in_two_worlds, args=(tmp_path, reported))
    rank.start()
    try:
        assert reported.get(timeout=LIMIT_S) == [2, 2, 0]  # all ranks, and itself alone on each axis
    finally:
        rank.kill()


def test_four_ranks_of_two_copies_of_two_slices(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # which has torch loaded already
    results: Queue[tuple[int, dict[str, object]]] = context.Queue()
    ranks = [context.Process(target=be_rank, args=(worker, tmp_path, results)) for worker in range(4)]
    for rank in ranks:
        rank.start()
    try:
        found = dict(results.get(timeout=LIMIT_S) for _ in ranks)
        for rank in ranks:
            rank.join(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
    reported = [found[worker] for worker in range(4)]
    assert [rank["place"] for rank in reported] == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
    assert [rank["mesh"] for rank in reported] == [rank["place"][1:] for rank in reported]
    assert [rank["head"] for rank in reported] == [True, False, True, False]
    assert (
        [rank["publishes"] for rank in reported] == [rank["leads"] for rank in reported] == [True, False, False, False]
    )
    assert [rank["data"] for rank in reported] == [2.0, 4.0, 2.0, 4.0], "sums over those with the same slice"
    assert [rank["everyone"] for rank in reported] == [6.0] * 4
    assert [rank["received"] for rank in reported] == [2.0, 3.0, 0.0, 1.0]
    assert reported[3]["outcome"] == "ValueError('mine')"
    assert [rank["timeouts"] for rank in reported] == [[[1800.0], [1800.0]]] * 4
    assert [rank["groups"] for rank in reported] == [4] * 4, "all, alone, one for each axis"
    assert not list(tmp_path.glob("training_world*"))
    for rank in reported[:3]:
        assert str(rank["outcome"]).startswith("PeerFailed"), rank
        assert "failing failed on another rank, 3 of 4: ValueError('mine')" in str(rank["outcome"])


def test_a_rank_alone_is_everyone() -> None:
    world = World()
    position = world.position("actor")
    assert world.publishes
    assert world.takes_trajectories
    assert position.data.all_reduce_sum(torch.tensor([3.0])).item() == 3.0
    with pytest.raises(ValueError, match="mine"):
        Ranks().together(lambda: (_ for _ in ()).throw(ValueError("mine")), "failing")
    assert issubclass(PeerFailed, RuntimeError)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_rank_chooses_its_gpu_before_anything_can_choose_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeviceMesh would take the GPU of LOCAL_RANK or of the rank's number, where each rank sees one."""
    done: list[object] = []

    def form(*_: object, **__: object) -> None:
        done.append("world")
        raise ConnectionError

    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", form)
    device, names = torch.device(name), make_resolver("file", str(tmp_path / "names"))
    with (
        pytest.raises(ConnectionError),
        training_world(ExperimentConfig(), 0, Placement({"actor": GRID}), device, tmp_path, names),
    ):
        pass
    assert done == [0, "world"]
