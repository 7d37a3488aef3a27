"""Say which processes a checked experiment would start."""

from __future__ import annotations

from rich.console import Console

from asyncrl.config.load import Config
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.run_dir import run_dir_of
from asyncrl.trainer.supervised.base_model import base_model_dir
from asyncrl.trainer.supervised.settings import SFTConfig


def dry_run(config: Config) -> int:
    """Print what a run would start; returns the exit code."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if isinstance(config, SFTConfig):
        console.print(f"1 process, {config.threads} threads, makes {base_model_dir(config)}")
        return 0
    console.print(f"run folder: {run_dir_of(config)}")
    for plan in plan_workers(config):
        resources = plan.resources
        gpus = f"GPUs {','.join(resources.gpus)}" if resources.gpus else "no GPU"
        console.print(f"  {plan.name:<20} {resources.threads} thread(s), {gpus}")
    return 0
