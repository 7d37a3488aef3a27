"""`python -m asyncrl.launch rollout EXPERIMENT [setting=value ...]`: generate and keep rollouts, without training.

Servers, GserverManager and RolloutWorkers are those of the experiment, with the model in `model.path`. It ends with
total_train_steps * train_batch_size rollouts in the run's folder `samples/`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from asyncrl.comm.files import PRIVATE_UMASK
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import SAMPLES_DIR
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.data import keep_data_record, keep_inputs
from asyncrl.launch.before_start.models import with_model
from asyncrl.launch.before_start.pipeline import StartChecks
from asyncrl.launch.before_start.setting_checks import experiment_parser, load_rl, validate
from asyncrl.launch.commands import refuse
from asyncrl.launch.train import command_on
from asyncrl.observe.display import make_display
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_FAILED
from asyncrl.runtime.trials.claim import TrialError
from asyncrl.trainer.supervised.base_model import BaseModelError


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    args = experiment_parser(f"{program} rollout", __doc__ or "").parse_intermixed_args(argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    os.umask(PRIVATE_UMASK)
    try:
        config = load_rl(args, ["samples.only=true", "eval.interval=0", *args.overrides])
        config = with_model(open_gate(config), args.config_dir)
        validate(config)
        return _run(config, console)
    except (BaseModelError, TrialError, ConfigError) as error:
        refuse(str(error))
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def open_gate(config: ExperimentConfig) -> ExperimentConfig:
    """Return `config` with a gate that admits exactly the wanted rollouts: as no new version follows, none gets old."""
    ahead = config.total_train_steps - 1
    held = config.total_train_steps * config.train_batch_size
    capacity = max(config.trainer.buffer_capacity, held)
    return replace(config, max_head_offpolicyness=ahead, trainer=replace(config.trainer, buffer_capacity=capacity))


def _run(config: ExperimentConfig, console: Console) -> int:
    with StartChecks(config) as checks:
        notes = checks.notes()
    title = f"asyncrl rollout {config.experiment_name}/{config.trial_name}"
    display = make_display(config.logging.display, title, config.total_train_steps, config.max_head_offpolicyness)
    launcher = Launcher(config, display)
    try:
        launcher.prepare()
        keep_data_record(config)
        keep_inputs(config)
        for line in notes:
            display.note(line)
        code = launcher.run()
    finally:
        display.close()
    folder = launcher.run_dir / SAMPLES_DIR
    console.print(f"samples    {folder}")
    console.print(f"           show them with: {command_on('show', launcher.run_dir)}")
    return code
