"""`python -m asyncrl.launch doctor RUN`, or `doctor EXPERIMENT [setting=value ...]`: find problems, and suggest
settings.

For a run it reads the files (`run.py`); for an experiment it makes every check of a start without starting anything
(`start_checks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.run_dir import CONFIG_FILE


def main(argv: Sequence[str], program: str) -> int:
    """Run the command; return the exit code."""
    of = next((item for item in argv if not item.startswith("-")), None)
    if of is None or "/" in of or _is_run(Path(of)):
        from asyncrl.launch.commands.doctor import run

        return run.main(argv, program)
    from asyncrl.launch.commands.doctor import start_checks

    return start_checks.main(argv, program)


def _is_run(path: Path) -> bool:
    """True for a run's folder or a file of one; `fileroot=.` leaves a folder with the name of the experiment."""
    return path.is_file() or (path / CONFIG_FILE).is_file()
