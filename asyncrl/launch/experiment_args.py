"""Arguments shared by commands that run a part of an experiment: its name, settings and folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RL_ONLY = "{!r} is an experiment of supervised training; give one of reinforcement learning"


@dataclass(frozen=True, slots=True)
class ExperimentArgs:
    """An experiment, its overrides, and the folder of the user's experiments (None: the built-in ones)."""

    experiment: str
    overrides: list[str]
    folder: Path | None


def parse(argv: Sequence[str], program: str, description: str) -> ExperimentArgs:
    """Return the arguments in `argv`; end the process if they are invalid."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("experiment", help="name of an experiment")
    parser.add_argument("overrides", nargs="*", help="setting=value")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of your own experiments")
    found = parser.parse_intermixed_args(argv)
    return ExperimentArgs(found.experiment, found.overrides, found.config_dir)
