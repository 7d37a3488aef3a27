"""Every kind of process of a run: where its class is, how many there are and what each may use, how it ends.

The launcher, the plan and the entry point read this registry and know no kind by name. To add a kind, write its
process, a `Worker`, and enter it here by import path; only a process of that kind loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from asyncrl.comm.names import (
    EVALUATION_MASTER,
    EVALUATION_WORKER,
    GENERATION_SERVER,
    GSERVER_MANAGER,
    MASTER_WORKER,
    MODEL_WORKER,
    RECORDER,
    ROLLOUT_WORKER,
)
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.runtime.worker_plan import Resources
from asyncrl.trainer.settings import placement

SHARED_CPU_NICENESS = 10
"""Of everything else where training runs on the CPU. What competes with it for cores works ahead already, up to η; a
trainer that waits leaves the cores to the others anyway."""


class Run(StrEnum):
    """What a launch is for."""

    train = auto()
    evaluate = auto()
    """Evaluation of a model that stands, without a trainer."""


_TRAIN, _EVALUATE = frozenset({Run.train}), frozenset({Run.evaluate})


class Restart(StrEnum):
    """What it takes to go on after a process died."""

    nothing = auto()
    """The run ends; the same command goes on from its newest checkpoint."""
    alone = auto()
    """A new one can take its place at any time, and the launcher starts it (`restart_budget`)."""
    together = auto()
    """All of the trainer's side begin again together, from the last step, which outlives them (`last_step`)."""
    alone_or_together = auto()
    """A new one looks where the others of the trainer's side stand; it goes on with them as they are, or says that it
    takes all of them (`EXIT_TOGETHER`).
    """


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """One kind of process.

    Attributes:
        path: import path `package.module:Class` of its `Worker`.
        processes: what each process of this kind may use, one entry per process, from the config and the visible GPUs.
        runs: the launches that it is part of.
        leads: its orderly end is the end of the run; asked to stop, it saves first. One kind of a launch leads.
        serves: the others call it; it is asked to stop after them, so that nobody waits for an answer in vain.
        essential: the run ends with it. The death of any other is noted, and the run goes on.
        restart: what the launcher does when one has died.
    """

    path: str
    processes: Callable[[ExperimentConfig, Sequence[str]], list[Resources]]
    runs: frozenset[Run] = _TRAIN
    leads: bool = False
    serves: bool = False
    essential: bool = True
    restart: Restart = Restart.nothing


def _training_ranks(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    """The first GPUs, one each, for the ranks of all roles by worker index."""
    if config.samples.only:
        return []
    ours = gpus if config.trainer.device != Device.cpu else ()
    return [Resources(config.trainer.threads, _share(worker, 1, ours)) for worker in range(placement(config).workers)]


def _generation_servers(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    """The GPUs that training leaves, `generation.sglang.tensor_parallel` each; too few are shared in turn."""
    if config.samples.replay:
        return []
    generation = config.generation
    ours: Sequence[str] = ()
    if generation.device != Device.cpu:
        taken = len(_training_ranks(config, gpus)) if config.trainer.device != Device.cpu else 0
        ours = gpus[min(taken, max(len(gpus) - 1, 0)) :]
    niceness = 0 if ours else _niceness(config, gpus)
    return [
        Resources(generation.threads, _share(index, generation.sglang.tensor_parallel, ours), niceness)
        for index in range(len(generation.sglang.urls) or generation.servers)
    ]


def _rollout_workers(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    return _manager(config, gpus) * config.rollout.workers


def _manager(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    return [] if config.samples.replay else _one_on_cpu(config, gpus)


def _master(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    return [] if config.samples.only else _one_on_cpu(config, gpus)


def _recorder(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    return _one_on_cpu(config, gpus) if config.samples.only else []


def _one_on_cpu(config: ExperimentConfig, gpus: Sequence[str]) -> list[Resources]:
    return [Resources(niceness=_niceness(config, gpus))]


def _niceness(config: ExperimentConfig, gpus: Sequence[str]) -> int:
    return 0 if gpus and config.trainer.device != Device.cpu else SHARED_CPU_NICENESS


def _share(index: int, each: int, gpus: Sequence[str]) -> tuple[str, ...]:
    """GPUs of the `index`-th taker of `each` out of `gpus`, in turn."""
    return tuple(gpus[(index * each + offset) % len(gpus)] for offset in range(min(each, len(gpus))))


KINDS = {
    MODEL_WORKER: ProcessKind("asyncrl.trainer.process:ModelWorker", _training_ranks, restart=Restart.together),
    GENERATION_SERVER: ProcessKind(
        "asyncrl.inference.process:GenerationServer",
        _generation_servers,
        runs=_TRAIN | _EVALUATE,
        serves=True,
        restart=Restart.alone,
    ),
    ROLLOUT_WORKER: ProcessKind("asyncrl.rollout.process:RolloutWorker", _rollout_workers, restart=Restart.alone),
    EVALUATION_WORKER: ProcessKind(
        "asyncrl.rollout.evaluation_process:EvaluationWorker", _rollout_workers, runs=_EVALUATE
    ),
    GSERVER_MANAGER: ProcessKind(
        "asyncrl.manager.process:GserverManager",
        _manager,
        runs=_TRAIN | _EVALUATE,
        serves=True,
        restart=Restart.alone,
    ),
    MASTER_WORKER: ProcessKind(
        "asyncrl.master.process:MasterWorker", _master, leads=True, restart=Restart.alone_or_together
    ),
    RECORDER: ProcessKind("asyncrl.master.recorder:Recorder", _recorder, leads=True),
    EVALUATION_MASTER: ProcessKind(
        "asyncrl.master.evaluation_process:EvaluationMaster", _one_on_cpu, runs=_EVALUATE, leads=True
    ),
}
"""By name, the slowest to start first."""
