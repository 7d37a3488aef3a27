"""Which processes a config asks for, with their threads and GPUs. Pure, so that `--dry-run` shows what a run would
start."""

from __future__ import annotations

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.runtime.gpus import count_gpus
from asyncrl.runtime.launchers.local import WorkerPlan
from asyncrl.trainer.settings import data_parallel_ranks

SHARED_CPU_NICENESS = 10
"""Of everything else where training runs on the CPU. What competes with it for cores works ahead already, up to η; a
trainer that waits leaves the cores to the others anyway."""


def plan_workers(config: ExperimentConfig, gpus: int | None = None) -> list[WorkerPlan]:
    """Every worker of the run, the slowest to start first.

    `gpus` is the number of GPUs to share out, default: those of this machine. Training ranks take the first ones, one
    each;
    generation servers the rest, `generation.sglang.tensor_parallel` each. Where there are too few, they are shared in
    turn.
    """
    gpus = count_gpus() if gpus is None else gpus
    ranks = data_parallel_ranks(config.trainer.parallel)
    trainer_gpus = gpus if config.trainer.device != Device.cpu else 0
    niceness = 0 if trainer_gpus else SHARED_CPU_NICENESS
    plans = [
        WorkerPlan("model_worker", rank, config.trainer.threads, _share(rank, 1, 0, trainer_gpus))
        for rank in range(ranks)
    ]
    if config.generation.device != Device.cpu:
        first = min(ranks, max(gpus - 1, 0)) if trainer_gpus else 0
        server_gpus, per_server = gpus - first, config.generation.sglang.tensor_parallel
    else:
        first, server_gpus, per_server = 0, 0, 1
    servers = len(config.generation.sglang.urls) or config.generation.servers
    plans += [
        WorkerPlan(
            "generation_server",
            index,
            config.generation.threads,
            _share(index, per_server, first, server_gpus),
            niceness=0 if server_gpus else niceness,
        )
        for index in range(servers)
    ]
    on_cpu = [("rollout_worker", index) for index in range(config.rollout.workers)]
    on_cpu += [("gserver_manager", 0), ("master_worker", 0)]
    return plans + [WorkerPlan(kind, index, 1, (), niceness) for kind, index in on_cpu]


def _share(index: int, each: int, first: int, gpus: int) -> tuple[int, ...]:
    """GPUs of the `index`-th taker of `each`, out of `gpus` from `first` on, in turn."""
    if gpus == 0:
        return ()
    return tuple(first + (index * each + offset) % gpus for offset in range(min(each, gpus)))
