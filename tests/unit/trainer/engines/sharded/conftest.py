"""Worlds of several ranks on this machine, and what training on one of them leaves."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from asyncrl.comm.name_resolve import make_resolver
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.master.graph import load_graph
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.parallel.placement import placement
from asyncrl.trainer.parallel.process_groups import training_world
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.rank.training_rank import TrainingRank

LIMIT_S = 600.0
Body = Callable[[World], Any]
OnRanks = Callable[[ExperimentConfig, Body], list[Any]]
Statistics = dict[str, Any]
"""Of all calls: a number, or its total, count and so on."""
Step = Callable[[ExperimentConfig, TrainingRank, int], Statistics]
Arrays = dict[str, NDArray[Any]]


def _next(reported: Any, ranks: list[Any]) -> tuple[int, Any]:
    """Return the report of the next rank to finish; raise at once if a rank crashed."""
    for _ in range(int(LIMIT_S)):
        with suppress(queue.Empty):
            found: tuple[int, Any] = reported.get(timeout=1.0)
            return found
        if crashed := [rank for rank in ranks if rank.exitcode]:
            raise RuntimeError(f"a rank crashed with exit code {crashed[0].exitcode}")
    raise TimeoutError(f"no rank was done within {LIMIT_S:g} s")


@pytest.fixture
def on_ranks(tmp_path: Path) -> OnRanks:
    """`(config, body) -> what body returns on each rank of trainer.parallel`, by worker index."""

    def run(config: ExperimentConfig, body: Body) -> list[Any]:
        context = multiprocessing.get_context("fork")  # which has torch loaded already
        reported: Any = context.Queue()
        folder = Path(tempfile.mkdtemp(dir=tmp_path))  # its own: nobody meets who was in a world before
        placed = placement(config, load_graph(config))
        config.trainer.engine = "sharded"  # also where a rank is alone

        def be_rank(worker: int) -> None:
            torch.set_num_threads(1)
            names = make_resolver("file", str(folder / "names"))
            try:
                with training_world(config, worker, placed, torch.device("cpu"), folder, names) as world:
                    reported.put((worker, body(world)))
            except BaseException:
                reported.put((worker, RuntimeError(traceback.format_exc())))

        ranks = [context.Process(target=be_rank, args=(worker,)) for worker in range(placed.workers)]
        for process in ranks:
            process.start()
        found = {}
        try:
            for _ in ranks:
                worker, value = _next(reported, ranks)
                if isinstance(value, RuntimeError):
                    raise value
                found[worker] = value
        finally:
            for process in ranks:
                process.kill()
        return [found[worker] for worker in range(placed.workers)]

    return run


@pytest.fixture
def step(run_step: Any, make_trajectories: Any) -> Step:
    """One train step on this rank's share of five groups; returns the statistics of its calls."""

    def run(config: ExperimentConfig, rank: TrainingRank, version: int) -> Statistics:
        data = rank.world.position("actor").data
        mine = make_trajectories(groups=5, group_size=2, seed=version)[data.rank :: data.world]
        dealt = [number % 2 for number in range(5)][data.rank :: data.world]
        calls = run_step(config, rank, build_step_batch(mine, dealt, version=version, num_minibatches=2))
        return {f"{call}/{name}": value for call, reported in calls.items() for name, value in reported.items()}

    return run
