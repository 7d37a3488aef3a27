"""Print the processes that a checked experiment would start."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import yaml  # type: ignore[import-untyped]
from rich.console import Console

from asyncrl.config.load import Config
from asyncrl.config.run_dir import run_dir_of
from asyncrl.config.secrets import hide
from asyncrl.plugins.named_inputs import named_inputs
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.planning.plan_workers import plan_workers
from asyncrl.runtime.planning.process_kinds import brings_inputs
from asyncrl.trainer.supervised.base_model import base_model_dir
from asyncrl.trainer.supervised.settings import SFTConfig


def dry_run(config: Config, again: Sequence[str] = ()) -> int:
    """Print the processes that a run would start; return the exit code.

    With `system.launcher=kubernetes` that is a YAML file for `kubectl apply -f -`, with the processes as its comment. A
    terminal does not show secrets.

    Args:
        config: the experiment.
        again: arguments of the command that starts it.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if isinstance(config, SFTConfig):
        console.print(f"1 process, {config.threads} threads, makes {base_model_dir(config)}")
        return 0
    run_dir, plans = run_dir_of(config), plan_workers(config)
    objects = backend_class(config.system.launcher).objects(config, plans, again)
    comment = "# " if objects else ""
    console.print(f"{comment}run folder: {run_dir}")
    environments = [set(plan.environment().items()) for plan in plans]
    shared = set.intersection(*environments)
    console.print(f"{comment}environment of every process: {_assignments(shared)}")
    for plan, environment in zip(plans, environments, strict=True):
        resources = plan.resources
        gpus = f"GPUs {','.join(resources.gpus)}" if resources.gpus else "no GPU"
        address = f" ({plan.host.address})" if plan.host.address else ""
        where = f"on {plan.host.name}{address}, " if plan.host.name else ""
        threads = f"{resources.threads} thread{'s' * (resources.threads != 1)}"
        console.print(f"{comment}  {plan.name:<20} {where}{threads}, {gpus}")
        console.print(f"{comment}    {shlex.join(plan.command(run_dir))}")
        if own := environment - shared:
            console.print(f"{comment}    {_assignments(own)}")
    for named in named_inputs(config) if brings_inputs(config) else ():
        if named.path is not None:
            console.print(f"  {named.setting}={named.value}: its files are brought to the hosts of the RolloutWorkers")
        elif named.module:
            console.print(f"  {named.setting}={named.value}: has to be the same on the hosts of the RolloutWorkers")
    if objects:
        for secret in (each["stringData"] for each in objects if each["kind"] == "Secret" and sys.stdout.isatty()):
            console.print("# a terminal does not show the Secret's values: pipe this to kubectl")
            secret.update({name: hide(text) for name, text in secret.items()})
        console.print(yaml.safe_dump_all(objects, sort_keys=False).rstrip("\n"))
    return 0


def _assignments(variables: set[tuple[str, str]]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables))
