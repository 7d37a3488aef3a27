"""Run a checked experiment: make its base model first if necessary, run it to its end, and show how it ended."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.comm.files import PRIVATE_UMASK
from asyncrl.config.describe import program
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.run_dir import EXIT_FILE, run_dir_of
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.data import show_prompts
from asyncrl.launch.before_start.machine import device_lines, space_line
from asyncrl.launch.before_start.models import base_model_config, check_models, with_model
from asyncrl.launch.before_start.pipeline import StartChecks
from asyncrl.launch.before_start.rehearsal import rehearsed
from asyncrl.launch.before_start.same_data import (
    check_same_data,
    check_same_roles,
    keep_data_record,
    keep_inputs,
    missing_history,
)
from asyncrl.launch.commands.attach import attach_again, detach
from asyncrl.launch.refusal import refuse
from asyncrl.launch.summary import SUMMARY_INDENT, summary_lines
from asyncrl.models.weights.versions.manifest import verify
from asyncrl.observe.display import make_display, wrapped
from asyncrl.observe.doctor import examine
from asyncrl.observe.history import History
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_HELD, EXIT_INTERRUPTED, EXIT_OK
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.settings import Resume
from asyncrl.runtime.trials.claim import TrialError, TrialHeld
from asyncrl.runtime.trials.resume import check_finished, check_run_files
from asyncrl.trainer.supervised.base_model import BaseModelError, ensure_base_model, existing_base_model
from asyncrl.trainer.supervised.settings import SFTConfig


def train(config: Config, folder: Path | None, *, again: Sequence[str] | None = None, detached: bool = False) -> int:
    """Run the experiment; return the exit code. `folder` has the experiments (None: the built-in ones).

    Args:
        again: the command line that runs it in the background; None: it runs here.
        detached: True in the background process.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    os.umask(PRIVATE_UMASK)
    try:
        if isinstance(config, SFTConfig) and again is not None:
            raise ConfigError("--detach: a base model is made in the foreground; leave --detach out")
        if isinstance(config, SFTConfig):
            if existing_base_model(config) is None:
                check_models(config)
            console.print(f"model: {ensure_base_model(config)}")
            return EXIT_OK
        backend_class(config.system.launcher).check_place()
        if config.model.path is None and existing_base_model(base_model_config(config, folder)) is None:
            with rehearsed(config) as rehearsal_notes:
                rehearsal_notes()  # the code alone, as making the model takes a while
        return _run_rl(with_model(config, folder), console, again, detached)
    except (BaseModelError, TrialError, ConfigError) as error:
        refuse(error)
        if isinstance(error, TrialHeld):
            return EXIT_HELD
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run_rl(config: ExperimentConfig, console: Console, again: Sequence[str] | None, detached: bool) -> int:
    run_dir = run_dir_of(config)
    if (code := attach_again(config)) is not None:
        return code
    if config.resume == Resume.auto:
        check_run_files(run_dir)
    if config.resume == Resume.auto and check_finished(run_dir, config):
        console.print(f"{config.experiment_name}/{config.trial_name} is complete; nothing was run. Its summary:")
        show_summary(run_dir, console)
        console.print(
            "raise total_train_steps to continue, choose another trial_name, or start over with resume=restart"
        )
        return EXIT_OK
    with StartChecks(config) as checks:
        notes = checks.notes()
    if again is not None:
        return detach(again, run_dir)
    title = f"asyncrl {config.experiment_name}/{config.trial_name}"
    display = make_display(config.logging.display, title, config.total_train_steps, config.max_head_offpolicyness)
    launcher = Launcher(config, display, detached=detached, check_checkpoint=verify)
    try:
        if config.resume == Resume.auto:
            notes += [f"WARNING: {note}" for note in check_same_data(config)]
            check_same_roles(config)
            notes += [f"WARNING: {note}" for note in missing_history(config)]
        launcher.prepare()
        keep_data_record(config)
        keep_inputs(config)
        enough, space = space_line(config)
        for line in (*device_lines(config), *([] if enough else [f"WARNING: {space}"]), *notes):
            display.note(line)
        show_prompts(config, checks.statistics, run_dir, display.note)
        code = launcher.run()
    finally:
        display.close()
    if detached:
        (run_dir / EXIT_FILE).write_text(str(code))  # before `show_end`, whose failure must not hide how the run ended
    show_end(run_dir, code, console)
    return code


def show_end(run_dir: Path, code: int, console: Console) -> None:
    """Show the end of a run that exited with `code`."""
    show_summary(run_dir, console)
    verdict = examine(History(run_dir)).verdict
    line = f"doctor     {'nothing is wrong' if verdict is None else verdict.title}"
    console.print(wrapped(line, console, SUMMARY_INDENT))
    for line in what_next(run_dir, code):
        console.print(line)


def show_summary(run_dir: Path, console: Console) -> None:
    """Show the run's summary."""
    for line in summary_lines(run_dir):
        console.print(wrapped(line, console, SUMMARY_INDENT))


def what_next(run_dir: Path, code: int) -> list[str]:
    """Return the commands that show more of a run that ended with `code`, each in a line that can be copied."""
    run = shlex.quote(str(run_dir))
    commands = [f"{program()} doctor {run}", f"{program()} dashboard {run}"]
    lines = [f"{label:<{SUMMARY_INDENT}}{command}" for label, command in zip(("look at it", ""), commands, strict=True)]
    continues = f"{'continue':<{SUMMARY_INDENT}}the same command continues from the newest checkpoint"
    return [*lines, continues] if code == EXIT_INTERRUPTED else lines
