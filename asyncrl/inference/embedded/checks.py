"""Checks of the settings that concern the embedded engine alone."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.plan import plan_workers


def check(config: ExperimentConfig) -> Iterator[str]:
    """Yield an error message for each invalid setting: none."""
    yield from ()


def warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield a warning for each valid setting with a surprising effect."""
    try:
        plans = plan_workers(config)
    except ValueError:  # no layout, or no graph
        return  # reported by the trainer's checks and by the launcher
    if any(plan.kind == GENERATION_SERVER and plan.resources.gpus for plan in plans):
        yield (
            "generation.backend='embedded': on a GPU it is for tests and small models, as a token costs some thirty "
            "operators a layer, each started by the CPU; use generation.backend=sglang for speed"
        )
