"""Requirements of NCCL to connect trainer and servers: separate GPUs, and the same version in both environments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.planning.plan_workers import WorkerPlan, plan_workers
from asyncrl.trainer.parallel.placement import placement

_ASK = "import torch; print(torch.__version__, '.'.join(map(str, torch.cuda.nccl.version())))"
_ASK_LIMIT_S = 120.0
"""Time limit in seconds: the first import of a torch on a machine is slow."""


class Installed(NamedTuple):
    """The versions in one environment."""

    torch: str
    nccl: str


@cache
def installed(python: str) -> Installed | None:
    """Return the versions in the environment of the interpreter `python`; None if unknown, for example without NCCL."""
    try:
        command = [str(Path(python).expanduser()), "-c", _ASK]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_LIMIT_S).stdout
        return Installed(*answer.split())
    except (OSError, subprocess.SubprocessError, TypeError):
        return None


def problems(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message if the trainer shares its GPU with a server, or if both are on this host's GPUs and have
    two versions.
    """
    engine = config.generation.engine
    if engine.program is None or engine.urls:
        return  # unknown for servers that asyncrl did not start
    try:
        plans = plan_workers(config)
    except ValueError:  # no layout, or no graph
        return  # reported by the trainer's checks and by the launcher
    yield from _shared_gpu(config, plans)
    on_gpus = {plan.kind for plan in plans if plan.resources.gpus and not plan.host.name}
    if not {MODEL_WORKER, GENERATION_SERVER} <= on_gpus:
        return
    here, there = installed(sys.executable), installed(engine.program.python or sys.executable)
    if here is not None and there is not None and here.nccl != there.nccl:
        yield (
            f"manager.weight_transport={config.manager.weight_transport!r}: NCCL connects processes of one version "
            f"only, and the trainer has NCCL {here.nccl} (torch {here.torch}), {engine.label} {there.nccl} (torch "
            f"{there.torch}, {engine.program.python}); install torch=={there.torch.partition('+')[0]} beside "
            "asyncrl, or use weight_transport=disk or tensor"
        )


def _shared_gpu(config: ExperimentConfig, plans: Sequence[WorkerPlan]) -> Iterator[str]:
    """Yield an error message for the first server on the GPU of the rank that sends the weights."""
    ranks = [plan for plan in plans if plan.kind == MODEL_WORKER]
    if not ranks:
        return
    sender = ranks[placement(config).actor.publisher]
    for plan in plans:
        shared = set(plan.resources.gpus).intersection(sender.resources.gpus)
        if plan.kind == GENERATION_SERVER and plan.host.name == sender.host.name and shared:
            yield (
                f"manager.weight_transport={config.manager.weight_transport!r}: NCCL connects no two processes on one "
                f"GPU, and {sender.name}, which sends the weights, shares GPU {min(shared)} with {plan.name}; use "
                "weight_transport=tensor or disk, or give servers other GPUs than the first training rank"
            )
            return
