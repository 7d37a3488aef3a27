"""The last lines of a run on the terminal: its summary, the doctor's verdict, and the commands that show more."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from asyncrl.config.describe import program
from asyncrl.observe.display import wrapped
from asyncrl.observe.doctor import examine
from asyncrl.observe.history import History
from asyncrl.runtime.exit_codes import EXIT_INTERRUPTED
from asyncrl.runtime.trials.summary import SUMMARY_INDENT, summary_lines


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
