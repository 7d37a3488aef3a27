"""The versions of NCCL in the trainer's environment and in SGLang's: a process group needs the same version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.planning.plan_workers import plan_workers

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
    """Yield an error message if trainer and servers, both on this host's GPUs, have two versions."""
    generation = config.generation
    if generation.sglang.urls:
        return  # unknown for servers that asyncrl did not start
    try:
        plans = plan_workers(config)
    except ValueError:  # no layout, or no graph
        return  # reported by the trainer's checks and by the launcher
    on_gpus = {plan.kind for plan in plans if plan.resources.gpus and not plan.host.name}
    if not {MODEL_WORKER, GENERATION_SERVER} <= on_gpus:
        return
    here, there = installed(sys.executable), installed(generation.sglang.python or sys.executable)
    if here is not None and there is not None and here.nccl != there.nccl:
        yield (
            f"manager.weight_transport={config.manager.weight_transport!r}: NCCL connects processes of one version "
            f"only, and the trainer has NCCL {here.nccl} (torch {here.torch}), SGLang {there.nccl} (torch "
            f"{there.torch}, {generation.sglang.python}); install torch=={there.torch.partition('+')[0]} beside "
            "asyncrl, or use weight_transport=disk or tensor"
        )
