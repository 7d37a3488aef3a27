"""`python -m asyncrl.launch doctor EXPERIMENT [setting=value ...]`: make every check of a start, without starting.

Exit codes: 0 it can start, 2 it cannot; the lines say why.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.data import check_data
from asyncrl.launch.before_start.machine import space_line
from asyncrl.launch.before_start.models import base_model_config, check_models
from asyncrl.launch.before_start.pipeline import Outcome, StartChecks
from asyncrl.launch.before_start.setting_checks import complete, experiment_parser, warnings
from asyncrl.runtime.plan import with_types
from asyncrl.runtime.settings import EXIT_CONFIG, EXIT_OK
from asyncrl.runtime.trials.claim import TrialError
from asyncrl.trainer.supervised.base_model import existing_base_model
from asyncrl.trainer.supervised.settings import SFTConfig

INDENT = 14
"""Width of a check's mark and name."""


class _Report:
    """Prints each check with its outcome."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.failed = False

    def check(self, name: str, run: Callable[[], Outcome]) -> None:
        """Make a check, and print its outcome or its error."""
        try:
            outcome = run()
            result = "; ".join([*outcome.found, *outcome.notes])
        except (ConfigError, TrialError, OSError) as error:
            self.fail(name, error)
            return
        mark, style = ("-", "yellow") if outcome.skipped else ("✓", "green")
        self.line(mark, style, name, result)

    def fail(self, name: str, error: Exception) -> None:
        """Print the error."""
        self.line("✗", "bold red", name, str(error))
        self.failed = True

    def line(self, mark: str, style: str, name: str, result: str) -> None:
        """Print a line."""
        lines = result.splitlines() or [""]
        if self._console.is_terminal:
            width = max(20, self._console.width - INDENT - 1)
            lines = [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
        for number, line in enumerate(lines):
            head = Text(f"{mark} {name}".ljust(INDENT) if not number else " " * INDENT, style=style)
            self._console.print(head + Text(f" {line}"))


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    parser = experiment_parser(f"{program} doctor", "Make every check of a start, and start nothing.")
    args = parser.parse_intermixed_args(argv)
    report = _Report()
    config = _loaded(report, args)
    if config is not None:
        report.check("data", lambda: _data(config, args.config_dir))
        if isinstance(config, ExperimentConfig):
            _check_run(report, config, args.config_dir)
        elif config.model.path is not None:
            report.check("model", lambda: _models(config))
    return EXIT_CONFIG if report.failed else EXIT_OK


def _loaded(report: _Report, args: argparse.Namespace) -> Config | None:
    """Return the experiment's config; None if its settings are wrong."""
    loaded: list[Config] = []

    def load() -> Outcome:
        config = load_experiment(args.experiment, args.overrides, args.config_dir)
        complete(config)
        loaded.append(config)
        if not isinstance(config, ExperimentConfig):
            return Outcome()
        length = f"{config.total_train_steps} steps of {config.train_batch_size} x {config.group_size} answers"
        return Outcome([length], [f"warning: {line}" for line in warnings(config)])

    report.check("settings", load)
    return loaded[0] if loaded else None


def _data(config: Config, folder: Path | None) -> Outcome:
    check_data(config, folder)
    return Outcome(["readable"])


def _models(config: SFTConfig) -> Outcome:
    check_models(config)
    return Outcome(["the files of each hold all of it"])


def _check_run(report: _Report, config: ExperimentConfig, folder: Path | None) -> None:
    model = config.model.path
    try:
        if model is None and (made := existing_base_model(base_model_config(config, folder))) is not None:
            model = str(made)
        if model is None:
            report.line("-", "yellow", "model", "the base model is made at the first start; prompts are checked then")
        else:
            path = str(Path(model).expanduser().resolve())
            config = with_types(replace(config, model=replace(config.model, path=path)))
            report.check("disk", lambda: _space(config))
        with StartChecks(config) as checks:
            for name, check in checks:
                report.check(name, check)
    except ConfigError as error:  # no check can begin
        report.fail("model", error)


def _space(config: ExperimentConfig) -> Outcome:
    enough, line = space_line(config)
    if not enough:
        raise ConfigError(line)
    return Outcome([line])
