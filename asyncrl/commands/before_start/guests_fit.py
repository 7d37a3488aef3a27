"""Refuse a run whose guests and training ranks do not fit on a GPU in turns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncrl.comm.names import GENERATION_SERVER
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.inference.settings import guests_of
from asyncrl.runtime.plan import plan_workers

LIMIT_S = 120.0


def check_guests_fit(config: ExperimentConfig) -> None:
    """Check the memory of this host's GPUs, in another process, as models are counted with torch.

    Raises:
        ConfigError: some is missing; the message says how many GiB.
    """
    plans = plan_workers(config) if guests_of(config.generation) else []
    if not any(plan.resources.gpus for plan in plans if plan.kind == GENERATION_SERVER):
        return
    with TemporaryDirectory() as folder:
        write_run_config(config, Path(folder))
        argv = [sys.executable, "-m", "asyncrl.commands.show_allocation", folder]
        told = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout.strip()
    if told:
        raise ConfigError(told)
