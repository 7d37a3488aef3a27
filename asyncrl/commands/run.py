"""What `asyncrl.launch` does with a checked config: run it, or show what a run would do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, load_supervised
from asyncrl.config.setting import ConfigError
from asyncrl.master.graph.builtin import load_graph
from asyncrl.master.graph.picture import to_svg, to_text
from asyncrl.master.graph.types import GraphError
from asyncrl.observability.display import make_display
from asyncrl.runtime.launcher import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Launcher
from asyncrl.runtime.plan import plan_workers
from asyncrl.runtime.resume import TrialError, check_finished
from asyncrl.runtime.run_dir import run_dir_of
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.summary import summary_lines
from asyncrl.trainer.supervised.base_model import BaseModelError, base_model_dir, ensure_base_model
from asyncrl.trainer.supervised.settings import SFTConfig


def check_graph(config: Config) -> None:
    """Build the training step's graph, which checks it.

    Raises:
        ConfigError: it is not sound; the message names the calls.
    """
    if isinstance(config, ExperimentConfig):
        try:
            load_graph(config)
        except GraphError as error:
            raise ConfigError(str(error)) from error


def run_experiment(config: Config, folder: Path | None) -> int:
    """Run the experiment; returns the exit code. `folder` holds the experiments (None: the built-in ones)."""
    console = Console(highlight=False)
    try:
        if isinstance(config, SFTConfig):
            console.print(f"model: {ensure_base_model(config)}", markup=False, soft_wrap=True)
            return EXIT_OK
        return _run_rl(_with_model(config, folder), console)
    except (BaseModelError, TrialError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run_rl(config: ExperimentConfig, console: Console) -> int:
    run_dir = run_dir_of(config)
    if config.resume == Resume.auto and check_finished(run_dir, config):
        console.print(
            f"{config.experiment_name}/{config.trial_name} is complete; nothing was run. Its summary:", markup=False
        )
        for line in summary_lines(run_dir):
            console.print(line, markup=False, soft_wrap=True)
        console.print("raise total_train_steps to go on, choose another trial_name, or start over with resume=restart")
        return EXIT_OK
    title = f"asyncrl {config.experiment_name}/{config.trial_name}"
    display = make_display(config.logging.display, title, config.total_train_steps, config.max_head_offpolicyness)
    launcher = Launcher(config, display)
    try:
        launcher.prepare()
        code = launcher.run()
    finally:
        display.close()
    for line in summary_lines(run_dir):
        console.print(line, markup=False, soft_wrap=True)
    return code


def dry_run(config: Config) -> int:
    """Print what a run would start; returns the exit code."""
    console = Console(highlight=False)
    if isinstance(config, SFTConfig):
        console.print(
            f"1 process, {config.threads} threads, makes {base_model_dir(config)}", markup=False, soft_wrap=True
        )
        return EXIT_OK
    console.print(f"run folder: {run_dir_of(config)}", markup=False, soft_wrap=True)
    for plan in plan_workers(config):
        resources = plan.resources
        gpus = f"GPUs {','.join(resources.gpus)}" if resources.gpus else "no GPU"
        console.print(f"  {plan.name:<20} {resources.threads} thread(s), {gpus}", markup=False)
    return EXIT_OK


def show_graph(config: Config, target: str) -> int:
    """Print the training step's graph, or write it to the file `target` as SVG; returns the exit code."""
    if isinstance(config, SFTConfig):
        print("error: a supervised experiment has no graph", file=sys.stderr)
        return EXIT_FAILED
    graph = load_graph(config)
    if target == "-":
        print(to_text(graph))
    else:
        Path(target).write_text(to_svg(graph))
    return EXIT_OK


def _with_model(config: ExperimentConfig, folder: Path | None) -> ExperimentConfig:
    """The config with `model.path` a folder: as set, or the base model, made first if need be."""
    if config.model.path is not None:
        path = Path(config.model.path).expanduser().resolve()
    else:
        sft = load_supervised(config.model.base_experiment, folder)
        path = ensure_base_model(replace(sft, fileroot=config.fileroot))
    return replace(config, model=replace(config.model, path=str(path)))
