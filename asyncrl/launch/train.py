"""Run a checked experiment: make its base model first if necessary, run it to its end, and show how it ended.

The summary has the run's progress, the counts of rollouts, and the paths of its results.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from asyncrl.comm.ended_rollouts import CUT_SHORT, failure, lost_episodes
from asyncrl.comm.files import PRIVATE_UMASK
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config
from asyncrl.config.run_dir import (
    COUNTS_FILE,
    EXIT_FILE,
    LOGS_DIR,
    METRICS_FILE,
    RESTARTS_FILE,
    WEIGHTS_DIR,
    DamagedFile,
    read_document,
    read_summary,
    run_dir_of,
)
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.data import keep_data_record, keep_inputs, show_prompts
from asyncrl.launch.before_start.machine import device_lines, space_line
from asyncrl.launch.before_start.models import base_model_config, check_models, with_model
from asyncrl.launch.before_start.pipeline import StartChecks
from asyncrl.launch.before_start.rehearsal import rehearsed
from asyncrl.launch.commands import program, refuse
from asyncrl.observe.display import make_display, wrapped
from asyncrl.observe.metrics.learning import FlatSteps
from asyncrl.observe.tail import read_rows
from asyncrl.runtime.backends import backend_class
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.run_log import restarts_in, seconds_in
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_FAILED, EXIT_HELD, EXIT_INTERRUPTED, EXIT_OK, Resume
from asyncrl.runtime.trials.claim import TrialError, TrialHeld, detached_holder
from asyncrl.trainer.supervised.base_model import BaseModelError, ensure_base_model, existing_base_model
from asyncrl.trainer.supervised.settings import SFTConfig
from asyncrl.weights.manifest import verify

SUMMARY_INDENT = 11
"""Columns of a line's label in the summary."""


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
        backend_class(config.system.launcher).check_host()
        if config.model.path is None and existing_base_model(base_model_config(config, folder)) is None:
            with rehearsed(config) as rehearsal_notes:
                rehearsal_notes()  # the code alone, as making the model takes a while
        return _run_rl(with_model(config, folder), console, again, detached)
    except (BaseModelError, TrialError, ConfigError) as error:
        refuse(error)
        if isinstance(error, TrialHeld):
            return EXIT_HELD
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def _run_rl(config: ExperimentConfig, console: Console, again: Sequence[str] | None, detached: bool) -> int:
    run_dir = run_dir_of(config)
    if detached_holder(run_dir) is not None and (code := _attaching().attach_again(config)) is not None:
        return int(code)
    resumes = config.resume == Resume.auto and run_dir.is_dir() and any(run_dir.iterdir())
    if resumes:
        from asyncrl.runtime.trials.resume import check_finished, check_run_files

        check_run_files(run_dir)
        if check_finished(run_dir, config):
            console.print(f"{config.experiment_name}/{config.trial_name} is complete; nothing was run. Its summary:")
            show_summary(run_dir, console)
            console.print(
                "raise total_train_steps to continue, choose another trial_name, or start over with resume=restart"
            )
            return EXIT_OK
    with StartChecks(config) as checks:
        notes = checks.notes()
    if again is not None:
        return int(_attaching().detach(again, run_dir))
    title = f"asyncrl {config.experiment_name}/{config.trial_name}"
    steps, eta = config.total_train_steps, config.max_head_offpolicyness
    display = make_display(config.logging.display, title, steps, eta, command_on("doctor", run_dir))
    launcher = Launcher(config, display, detached=detached, check_checkpoint=verify)
    try:
        if resumes:
            from asyncrl.launch.before_start.continued import check_continued

            notes += [f"WARNING: {note}" for note in check_continued(config)]
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


def _attaching() -> ModuleType:
    """Return the command `attach`, which is imported for detached runs alone."""
    return import_module("asyncrl.launch.commands.attach")


def show_end(run_dir: Path, code: int, console: Console) -> None:
    """Show the end of a run that exited with `code`."""
    show_summary(run_dir, console)
    for line in what_next(run_dir, code):
        console.print(line)


def what_next(run_dir: Path, code: int) -> list[str]:
    """Return the commands that show more of a run that ended with `code`, each in a line that can be copied."""
    lines = [("explain it", command_on("doctor", run_dir)), ("look at it", command_on("dashboard", run_dir))]
    if code == EXIT_INTERRUPTED:
        lines.append(("continue", "the same command continues from the newest checkpoint"))
    return [f"{label:<{SUMMARY_INDENT}}{what}" for label, what in lines]


def command_on(name: str, run_dir: Path) -> str:
    """Return a command on the run, to be copied; a folder below the user's is named from there, as lines are short."""
    home, folder = f"{os.path.expanduser('~')}/", str(run_dir)
    return f"{program()} {name} {'~/' if folder.startswith(home) else ''}{shlex.quote(folder.removeprefix(home))}"


def show_summary(run_dir: Path, console: Console) -> None:
    """Show the run's summary."""
    for line in summary_lines(run_dir):
        console.print(wrapped(line, console, SUMMARY_INDENT))


def summary_lines(run_dir: Path) -> list[str]:
    """Return the summary as lines; without one, the counts at the last step, and the logs to read.

    A damaged file is named in place of what it would say.
    """
    try:
        lines = _progress_lines(run_dir)
    except DamagedFile as error:
        lines = [f"DAMAGED    {error}"]
    return [
        *lines,
        f"metrics    {run_dir / METRICS_FILE}",
        f"weights    {run_dir / WEIGHTS_DIR}",
        f"logs       {run_dir / LOGS_DIR}",
    ]


def _progress_lines(run_dir: Path) -> list[str]:
    summary = read_summary(run_dir)
    lines = []
    if summary is None:
        lines.append("the run ended before it could write a summary")
        known = read_document(run_dir / COUNTS_FILE, {"books": dict, "step": int})
        lines += (
            ["rollouts   nothing was submitted"]
            if known is None
            else _counts_lines(known["books"], f", as of step {known['step']}")
        )
    else:
        lines.append(f"steps      {summary['steps']}")
        lines += [f"evaluated  {evaluated_line(name, figures)}" for name, figures in sorted(summary["eval"].items())]
        lines += map(_without_result, summary["evaluations_failed"])
        lines += _counts_lines(summary["books"])
    rows, restarts = read_rows(run_dir / METRICS_FILE), read_rows(run_dir / RESTARTS_FILE)
    flat, lost = FlatSteps(), Counter[str]()
    for row in rows:
        flat.take(row)
        lost += lost_episodes(row)  # missing from trained groups, by the kind of failure
    lines += [
        f"LOST       {count} episodes, as {name}; the logs of the rollout_workers say more"
        for name, count in sorted(lost.items())
    ]
    if (summary_line := flat.summary()) is not None:
        lines.append(f"NO SIGNAL  {summary_line}")
    if counts := ", ".join(f"{what} {count}" for what, count in sorted(restarts_in(restarts).items())):
        lines.append(f"restarts   {counts}; {seconds_in(restarts):.1f} s until they went on")
    return lines


def _without_result(evaluation: Mapping[str, Any]) -> str:
    """Return a line on an evaluation that failed or was cut short."""
    which = f"evaluation of version {evaluation['version']} on {evaluation['set']}"
    if evaluation["reason"] == CUT_SHORT:
        return f"CUT SHORT  {which}: the run was stopped before it had ended"
    return f"FAILED     {which}: {evaluation['reason']}"


def _counts_lines(totals: dict[str, Any], when: str = "") -> list[str]:
    """Return the balance of rollouts, and the rollouts that someone has to look at."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(totals["dropped"].items()))
    under_way = totals["running"] + totals["finished_untrained"]
    total = totals["trained"] + sum(totals["dropped"].values()) + totals["abandoned"] + under_way
    line = (
        f"rollouts   submitted {totals['submitted']} {'=' if totals['submitted'] == total else '≠'} "
        f"trained {totals['trained']} + dropped {sum(totals['dropped'].values())} {f'({dropped}) ' if dropped else ''}"
        f"+ abandoned {totals['abandoned']}"
    )
    if under_way:
        line += f" + under way {under_way}"
    failed = [
        f"FAILED     {count} rollouts {what} ({reason}); the logs of the rollout_workers say why"
        for reason, count in sorted(totals["dropped"].items())
        if count and (what := failure(reason)) is not None
    ]
    return [line + when, *failed]


def evaluated_line(name: str, figures: Mapping[str, float]) -> str:
    """Return a line on the newest evaluation of the set `name`; accuracy and pass@k only with verdicts.

    Example: `held_out: accuracy 0.953, pass@4 0.984, reward 0.953, 33 tokens, 0 % cut off (256 prompts, version 60)`.
    """
    parts = [f"{key} {value:.3f}" for key, value in figures.items() if key == "accuracy" or key.startswith("pass@")]
    parts.append(f"reward {figures['reward_mean']:.3f}")
    parts.append(f"{figures['len_mean']:.0f} tokens")
    parts.append(f"{100 * figures['truncated']:.0f} % cut off")
    return f"{name}: {', '.join(parts)} ({figures['prompts']:.0f} prompts, version {figures['version']:.0f})"
