"""Training over ranks in any layout is training in one process: same losses, same gradients, same weights."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.api.trajectory import Trajectory
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.trainer.engines.flat import FlatEngine
from asyncrl.trainer.engines.sharded.gathering import whole
from asyncrl.trainer.engines.sharded.engine import ShardedEngine
from asyncrl.trainer.parallel import MESH_AXES, Place, Ranks
from asyncrl.trainer.roles import TrainingRank, build_rank
from asyncrl.trainer.step_batch import build_step_batch
from asyncrl.trainer.worker_grid import WorkerGrid

LIMIT_S = 120.0
Body = Callable[[Place], Any]


def on_ranks(grid: WorkerGrid, folder: Path, body: Body) -> list[Any]:
    """What `body` returns on each rank of `grid`, by worker index."""
    context = multiprocessing.get_context("fork")  # which has torch loaded already
    told: Any = context.Queue()
    folder.mkdir(parents=True, exist_ok=True)

    def rank(worker: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "meeting"), grid.workers)
        dist.init_process_group("gloo", store=store, rank=worker, world_size=grid.workers)
        mesh = init_device_mesh("cpu", (grid.pipeline, grid.data, grid.tensor), mesh_dim_names=MESH_AXES)
        data = Ranks(mesh.get_local_rank("data"), grid.data, mesh.get_group("data"))
        try:
            told.put((worker, body(Place(worker, grid, Ranks(worker, grid.workers), data, mesh=mesh))))
        except BaseException:
            told.put((worker, RuntimeError(traceback.format_exc())))
        dist.destroy_process_group()

    ranks = [context.Process(target=rank, args=(worker,)) for worker in range(grid.workers)]
    for process in ranks:
        process.start()
    try:
        found = {}
        for _ in ranks:
            worker, value = told.get(timeout=LIMIT_S)
            if isinstance(value, RuntimeError):
                raise value
            found[worker] = value
    finally:
        for process in ranks:
            process.kill()
    return [found[worker] for worker in range(grid.workers)]


def grid_of(layout: str) -> WorkerGrid:
    sizes = {letter: int(size) for letter, size in zip(layout[::2], layout[1::2], strict=True)}
    return WorkerGrid(sizes.get("d", 1), sizes.get("t", 1), sizes.get("p", 1))


def train(
    config: ExperimentConfig, place: Place, trajectories: list[Trajectory], run_step: Any, steps: int = 2
) -> dict[str, Any]:
    from asyncrl.master.graph.builtin import load_graph

    rank: TrainingRank = build_rank(config, load_graph(config), place, torch.device("cpu"))
    mine = trajectories[place.data.rank :: place.data.world]
    dealt = [i % config.trainer.ppo_minibatches for i in range(len(trajectories))][place.data.rank :: place.data.world]
    told: dict[str, Any] = {"losses": []}
    for version in range(steps):
        batch = build_step_batch(mine, dealt, version=version, num_minibatches=config.trainer.ppo_minibatches)
        stats = run_step(config, rank, batch)
        told["losses"].append({name: values for call in stats.values() for name, values in call.items()})
    for role, engine in rank.engines.items():
        if not engine.trained:
            continue
        if isinstance(engine, ShardedEngine):
            told[role] = {
                name: (whole(p.grad).numpy().copy(), whole(p.detach()).numpy().copy())
                for name, p in engine.parameters().items()
            }
        else:
            assert isinstance(engine, FlatEngine)
            told[role] = {
                name: (p.grad.numpy().copy(), p.detach().numpy().copy()) for name, p in engine.module.named_parameters()
            }
    return told


@pytest.mark.parametrize("layout", ["d1", "d2", "t2", "p2", "d2t2p2"])
@pytest.mark.parametrize("model", ["qwen_dir", "llama_dir"])
def test_equal(
    model: str,
    layout: str,
    config: ExperimentConfig,
    make_trajectories: Any,
    run_step: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    config.model.path = str(request.getfixturevalue(model))
    config.algorithm.graph = "ppo"
    config.algorithm.advantage.name = "gae"
    config.algorithm.kl_coef = 0.1
    config.algorithm.entropy_coef = 0.01
    config.optimizer.lr = config.algorithm.critic.optimizer.lr = 1e-3
    trajectories = make_trajectories(groups=5)
    alone = train(config, Place(), trajectories, run_step)
    spread = on_ranks(grid_of(layout), tmp_path, lambda place: train(config, place, trajectories, run_step))
    for told in spread:
        for mine, theirs in zip(told["losses"], alone["losses"], strict=True):
            assert mine.keys() == theirs.keys()
            for name in theirs:
                if not name.startswith("time"):
                    if mine[name] != pytest.approx(theirs[name], rel=2e-4, abs=2e-5):
                        print("STAT", name, mine[name], theirs[name])
    for role in ("actor", "critic"):
        names = set().union(*(told[role] for told in spread))
        print(role, len(names), len(alone[role]))
        for told in spread:
            for name, (grad, weight) in told[role].items():
                other = alone[role][name]
                scale = abs(other[0]).max()
                print(layout, role, name, abs(grad - other[0]).max() / scale, abs(weight - other[1]).max())
                pass
                pass
