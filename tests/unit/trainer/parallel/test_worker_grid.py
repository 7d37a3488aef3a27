"""Workers, ranks, data heads and shards: who is who, in grids of every shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.master.graph import Call, Graph
from asyncrl.trainer.parallel.placement import Coordinates, Layout, Placement, WorkerGrid, placement, worker_grid
from asyncrl.trainer.settings import RolePlacementConfig, RoleRanks

sizes = st.integers(1, 4)
layouts = st.builds(lambda r, d, t, p, c: Layout(r * d, t, p, r, c), sizes, sizes, sizes, sizes, sizes)
grids = st.builds(WorkerGrid.of, layouts, st.integers(0, 5))


def test_the_worked_example() -> None:
    grid = WorkerGrid(data=2, tensor=2, pipeline=2)
    assert grid.workers == 8
    assert grid.coordinates(5) == Coordinates(pipeline=1, data=0, tensor=1)
    assert grid.data_heads == (0, 2)
    assert grid.publisher == 0


def test_pure_data_parallelism_numbers_workers_as_copies() -> None:
    config = ExperimentConfig()
    config.trainer.parallel = "d3"
    grid = worker_grid(config)
    assert grid == WorkerGrid(data=3)
    assert grid.data_heads == (0, 1, 2)


@given(grids)
def test_every_worker_has_one_place_numbered_as_a_device_mesh_does(grid: WorkerGrid) -> None:
    mesh = grid.first + torch.arange(grid.workers).view(grid.pipeline, grid.data, grid.context, grid.tensor)
    for worker in grid.members:
        position = grid.coordinates(worker)
        assert (
            grid.worker_at(position)
            == worker
            == mesh[position.pipeline, position.data, position.context, position.tensor]
        )


@given(grids)
def test_each_copy_has_one_head_and_the_publisher_is_a_head(grid: WorkerGrid) -> None:
    assert [grid.coordinates(head).data for head in grid.data_heads] == list(range(grid.data))
    assert grid.publisher in grid.data_heads


@given(layouts)
def test_every_worker_hosts_every_role_and_the_heads_take_trajectories(layout: Layout) -> None:
    grid = WorkerGrid.of(layout)
    placed = Placement({"actor": grid, "ref": grid})
    everyone = list(range(grid.workers))
    assert placed.members == {"actor": everyone, "ref": everyone}
    assert set(placed.actor.data_heads) <= set(everyone)


def test_the_worked_example_of_roles_on_other_ranks() -> None:
    placed = Placement({"actor": WorkerGrid(2, 2), "ref": WorkerGrid(tensor=2), "critic": WorkerGrid(2, first=4)})
    assert placed.workers == 6
    hosted = [{role: str(position) for role, position in placed.shards_of(worker).items()} for worker in (1, 3, 5)]
    assert hosted == [
        {"actor": "dp0.tp1.pp0", "ref": "dp0.tp1.pp0"},
        {"actor": "dp1.tp1.pp0"},
        {"critic": "dp1.tp0.pp0"},
    ]
    assert str(Placement({"actor": WorkerGrid(context=2)}).shards_of(1)["actor"]) == "dp0.cp1.tp0.pp0"
    assert placed.members == {"actor": [0, 1, 2, 3], "ref": [0, 1], "critic": [4, 5]}
    assert placed.actor.data_heads == (0, 2)


def graph_of(*roles: str) -> Graph:
    return Graph("g", tuple(Call(f"call_{role}", role, "f") for role in roles))


def settings_of(actor: Layout, roles: dict[str, tuple[Layout | None, RoleRanks]]) -> ExperimentConfig:
    config = ExperimentConfig()
    config.trainer.parallel = str(actor)
    for role, (layout, ranks) in roles.items():
        wanted = RolePlacementConfig(str(layout) if layout else None, ranks)
        if role in ("critic", "ref"):
            group = config.algorithm.critic if role == "critic" else config.algorithm.reference
            group.parallel, group.ranks = wanted.parallel, wanted.ranks
        else:
            config.algorithm.reward_models[role] = wanted
    return config


role_layouts = st.dictionaries(
    st.sampled_from(["critic", "ref", "judge"]), st.tuples(st.none() | layouts, st.sampled_from(RoleRanks))
)


@given(layouts, role_layouts)
def test_every_shard_of_every_role_has_one_worker_and_every_worker_a_shard(
    actor: Layout, roles: dict[str, tuple[Layout | None, RoleRanks]]
) -> None:
    config, graph = settings_of(actor, roles), graph_of("actor", *roles)
    too_large = [
        role
        for role, (layout, ranks) in roles.items()
        if ranks == RoleRanks.shared and layout is not None and layout.ranks > actor.ranks
    ]
    if too_large:
        with pytest.raises(
            ConfigError, match=rf"\.parallel=.*more than the actor's {actor.ranks} .*at most {actor.ranks}"
        ):
            placement(config, graph)
        return
    placed = placement(config, graph)
    own = {role: (layout or actor).ranks for role, (layout, ranks) in roles.items() if ranks == RoleRanks.own}
    assert placed.workers == actor.ranks + sum(own.values())
    assert placed.actor == WorkerGrid.of(actor)
    for role, (layout, ranks) in roles.items():
        assert placed.grids[role].layout == (layout or actor)
        assert len(placed.members[role]) == (layout or actor).ranks
        others = {worker for name, workers in placed.members.items() if name != role for worker in workers}
        if ranks == RoleRanks.own:
            assert not others & set(placed.members[role])
        else:
            assert placed.members[role] == placed.members["actor"][: len(placed.members[role])]
    shards = set()
    for worker in range(placed.workers):
        hosted = placed.shards_of(worker)
        assert hosted
        assert all(placed.grids[role].worker_at(position) == worker for role, position in hosted.items())
        shards |= set(hosted.items())
    assert len(shards) == sum(grid.ranks for grid in placed.grids.values())


def test_a_placement_needs_an_actor_and_no_idle_worker() -> None:
    with pytest.raises(ValueError, match="has no actor"):
        Placement({"ref": WorkerGrid()})
    with pytest.raises(ValueError, match="worker 1 hosts no role"):
        Placement({"actor": WorkerGrid(), "ref": WorkerGrid(first=2)})


@pytest.mark.parametrize("worker", [-1, 2])
def test_a_worker_beyond_the_grid_is_refused(worker: int) -> None:
    with pytest.raises(ValueError, match=f"worker {worker} is not one of the 2"):
        WorkerGrid(data=2).coordinates(worker)


def test_an_axis_below_one_and_a_start_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.parallel"):
        WorkerGrid(data=0)
    with pytest.raises(ValueError, match="before worker 0"):
        WorkerGrid(first=-1)
