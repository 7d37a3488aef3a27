"""Say which processes a checked experiment would start."""

from __future__ import annotations

import shlex

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
    run_dir, plans = run_dir_of(config), plan_workers(config)
    console.print(f"run folder: {run_dir}")
    for plan in plans:
        resources = plan.resources
        gpus = f"GPUs {','.join(resources.gpus)}" if resources.gpus else "no GPU"
        where = f"on {plan.host.name} ({plan.host.address}), " if plan.host.name else ""
        console.print(f"  {plan.name:<20} {where}{resources.threads} thread(s), {gpus}")
        console.print(f"    {shlex.join(plan.command(run_dir))}")
        console.print("    " + " ".join(f"{name}={value}" for name, value in sorted(plan.environment().items())))
    return 0
