"""The commands that the end of a run names."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from asyncrl.launch.commands import COMMANDS
from asyncrl.launch.train import what_next
from asyncrl.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_OK


@pytest.mark.parametrize("folder", ["/runs/demo/trial0", "/my runs/demo/trial0"])
def test_the_end_of_a_run_names_commands_that_can_be_copied(folder: str) -> None:
    lines = what_next(Path(folder), EXIT_OK)
    for line, name in zip(lines, ("doctor", "dashboard"), strict=True):
        assert name in COMMANDS
        assert shlex.split(line)[-2:] == [name, folder]


def test_an_interrupted_run_says_how_to_continue() -> None:
    *_, last = what_next(Path("run"), EXIT_INTERRUPTED)
    assert last == "continue   the same command continues from the newest checkpoint"
