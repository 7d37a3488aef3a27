"""`python -m asyncrl.launch doctor EXPERIMENT [setting=value ...]`: make every check of a start, without starting.

Exit codes: 0 it can start, 2 it cannot; the lines say why.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import Config, load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.checks import warnings
from asyncrl.launch.before_start.devices import device_lines
from asyncrl.launch.before_start.initial_model import base_model_config
from asyncrl.launch.before_start.input_checks import check_data, complete
from asyncrl.launch.before_start.prompt_checks import chat_notes, check_prompts
from asyncrl.launch.before_start.reachable import check_reachable
from asyncrl.launch.before_start.rehearse import rehearsed
from asyncrl.launch.before_start.space import space_line
from asyncrl.launch.before_start.whole_models import check_models
from asyncrl.launch.experiment_args import experiment_parser
from asyncrl.runtime.checks import check_place
from asyncrl.runtime.exit_codes import EXIT_CONFIG, EXIT_OK
from asyncrl.runtime.planning.plan_workers import with_types
from asyncrl.trainer.supervised.base_model import existing_base_model

INDENT = 14
"""Width of a check's mark and name."""

Checked = Callable[[], Iterator[str]]


class _Report:
    """Prints each check with its outcome."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.failed = False

    def check(self, name: str, run: Checked) -> bool:
        """Make a check, which yields its results or raises an error; return True if it raised none."""
        try:
            found = list(run())
        except (ConfigError, OSError) as error:
            self.line("✗", "bold red", name, str(error))
            self.failed = True
            return False
        self.line("✓", "green", name, "; ".join(found))
        return True

    def line(self, mark: str, style: str, name: str, told: str) -> None:
        """Print a line."""
        lines = told.splitlines() or [""]
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

    def load() -> Iterator[str]:
        config = load_experiment(args.experiment, args.overrides, args.config_dir)
        complete(config)
        loaded.append(config)
        if isinstance(config, ExperimentConfig):
            yield f"{config.total_train_steps} steps of {config.train_batch_size} x {config.group_size} answers"
            yield from (f"warning: {line}" for line in warnings(config))

    report.check("settings", load)
    return loaded[0] if loaded else None


def _data(config: Config, folder: Path | None) -> Iterator[str]:
    check_data(config, folder)
    yield "readable"


def _check_run(report: _Report, config: ExperimentConfig, folder: Path | None) -> None:
    def place() -> Iterator[str]:
        check_place(config)
        yield from device_lines(with_types(config))

    def hosts() -> Iterator[str]:
        notes = check_reachable(config)
        yield f"{len(config.system.hosts)} hosts answer" if config.system.hosts else "this one"
        yield from (f"warning: {note}" for note in notes)

    fits = report.check("devices", place)
    report.check("hosts", hosts)
    model = _model_folder(config, folder)
    if model is None:
        report.line("-", "yellow", "model", "the base model is made at the first start; prompts are checked then")
        return
    config = with_types(replace(config, model=replace(config.model, path=str(model))))
    report.check("model", lambda: _models(config))
    report.check("disk", lambda: _space(config))
    prompts = report.check("prompts", lambda: _prompts(config))
    if prompts and fits:
        report.check("first row", lambda: _rehearsal(config))


def _model_folder(config: ExperimentConfig, folder: Path | None) -> Path | None:
    """Return the folder of the model; None if it is a base model that has yet to be made."""
    if config.model.path is not None:
        return Path(config.model.path).expanduser().resolve()
    return existing_base_model(base_model_config(config, folder))


def _models(config: Config) -> Iterator[str]:
    check_models(config)
    yield "the files of each hold all of it"


def _space(config: ExperimentConfig) -> Iterator[str]:
    enough, line = space_line(config)
    if not enough:
        raise ConfigError(line)
    yield line


def _prompts(config: ExperimentConfig) -> Iterator[str]:
    for group, found in check_prompts(config).items():
        lines = found.lines(config.dataset.max_prompt_tokens, config.dataset.overlong)
        yield f"{group}: {'; '.join(lines)}"
    yield from chat_notes(config)


def _rehearsal(config: ExperimentConfig) -> Iterator[str]:
    with rehearsed(config) as notes:
        found = notes()
    yield from found or ["agent and reward took made-up answers to it"]
