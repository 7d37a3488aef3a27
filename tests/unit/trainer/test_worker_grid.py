"""Workers, ranks, data heads and shards: who is who, in grids of every shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.trainer.settings import worker_grid
from asyncrl.trainer.worker_grid import Coordinates, WorkerGrid

sizes = st.integers(1, 4)
grids = st.builds(WorkerGrid, data=sizes, tensor=sizes, pipeline=sizes)


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
    mesh = torch.arange(grid.workers).view(grid.pipeline, grid.data, grid.tensor)
    for worker in range(grid.workers):
        place = grid.coordinates(worker)
        assert grid.worker_at(place) == worker == mesh[place.pipeline, place.data, place.tensor]


@given(grids)
def test_each_copy_has_one_head_and_the_publisher_is_a_head(grid: WorkerGrid) -> None:
    assert [grid.coordinates(head).data for head in grid.data_heads] == list(range(grid.data))
    assert grid.publisher in grid.data_heads


@given(grids)
def test_every_worker_hosts_every_role_and_the_heads_take_trajectories(grid: WorkerGrid) -> None:
    table = grid.routing_table(["actor", "ref"])
    everyone = list(range(grid.workers))
    assert table.placement == {"actor": everyone, "ref": everyone}
    assert table.data_workers == grid.data_heads


@pytest.mark.parametrize("worker", [-1, 2])
def test_a_worker_beyond_the_grid_is_refused(worker: int) -> None:
    with pytest.raises(ValueError, match=f"worker {worker} is not one of the 2"):
        WorkerGrid(data=2).coordinates(worker)


def test_an_axis_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.parallel"):
        WorkerGrid(data=0)
