"""Which processes a config asks for, with their threads and GPUs. Pure, so that `--dry-run` can show them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.hardware import visible_gpus
from asyncrl.runtime.kinds import KINDS, Run
from asyncrl.runtime.worker_plan import WorkerPlan


def plan_workers(config: ExperimentConfig, gpus: Sequence[str] | None = None, run: Run = Run.train) -> list[WorkerPlan]:
    """Every process of the launch, in the order of `KINDS`; `gpus` are to be shared out, default: the visible ones."""
    gpus = visible_gpus() if gpus is None else gpus
    return [
        WorkerPlan(name, index, resources, leads=kind.leads)
        for name, kind in KINDS.items()
        if run in kind.runs
        for index, resources in enumerate(kind.processes(config, gpus))
    ]
