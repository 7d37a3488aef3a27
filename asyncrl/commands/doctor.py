"""`python -m asyncrl.launch doctor RUN`, or `doctor EXPERIMENT [setting=value ...]`: find problems, and suggest
settings.

For a run it reads the files (`asyncrl.commands.doctor_run`); for an experiment it makes every check of a start without
starting anything (`asyncrl.commands.doctor_experiment`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str], program: str) -> int:
    """The command line; returns the exit code."""
    of = next((item for item in argv if not item.startswith("-")), None)
    if of is None or Path(of).expanduser().exists() or "/" in of:
        from asyncrl.commands import doctor_run

        return doctor_run.main(argv, program)
    from asyncrl.commands import doctor_experiment

    return doctor_experiment.main(argv, program)
