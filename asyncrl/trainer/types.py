"""The types that a run computes in, chosen once by the launcher, so that every process of the run knows them."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.comm.names import GENERATION_SERVER, MODEL_WORKER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.settings import adopts
from asyncrl.runtime.kinds import Run
from asyncrl.runtime.plan import plan_workers


def with_types(config: ExperimentConfig, run: Run = Run.train) -> ExperimentConfig:
    """`config` with the types that `model.dtype` and `generation.dtype` stand for where they are `auto`.

    They follow from the plan, and every process of the run reads the same. The type of servers that somebody else
    started is not known and stays `auto`.
    """
    plans = plan_workers(config, run=run)

    def device_of(kind: str) -> str:
        return "cuda" if any(plan.resources.gpus for plan in plans if plan.kind == kind) else "cpu"

    model, generation = config.model, config.generation
    if not adopts(generation):
        generation = replace(generation, dtype=generation.dtype.on(device_of(GENERATION_SERVER)))
    return replace(config, model=replace(model, dtype=model.dtype.on(device_of(MODEL_WORKER))), generation=generation)
