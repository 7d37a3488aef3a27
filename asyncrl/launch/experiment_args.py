"""Arguments of commands that take an experiment, and the experiment that they name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.setting_checks import resolve_hub_names, resolve_length


def experiment_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of an experiment's name, its settings and the folder of the user's experiments."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("experiment", help="name of an experiment")
    parser.add_argument("overrides", nargs="*", help="setting=value")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of your own experiments")
    return parser


def load_rl(args: argparse.Namespace, overrides: Sequence[str]) -> ExperimentConfig:
    """Return the experiment of reinforcement learning that `args` name, its hub names and its length resolved.

    Raises:
        ConfigError: a setting is wrong, a name is not available from the hub, or the experiment is a supervised one.
    """
    config = load_experiment(args.experiment, overrides, args.config_dir)
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(
            f"{args.experiment!r} is an experiment of supervised training; give one of reinforcement learning"
        )
    resolve_hub_names(config)
    resolve_length(config)
    return config
