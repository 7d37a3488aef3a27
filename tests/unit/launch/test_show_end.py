"""The commands that the end of a run names."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import EXIT_FILE, run_dir_of
from asyncrl.launch import train
from asyncrl.launch.commands import COMMANDS, program
from asyncrl.launch.train import what_next
from asyncrl.observe.settings import DisplayMode
from asyncrl.runtime.settings import EXIT_INTERRUPTED, EXIT_OK


@pytest.mark.parametrize("folder", ["/runs/demo/trial0", "/my runs/demo/trial0"])
def test_the_end_of_a_run_names_commands_that_can_be_copied(folder: str) -> None:
    lines = what_next(Path(folder), EXIT_OK)
    for line, name in zip(lines, ("doctor", "dashboard"), strict=True):
        assert name in COMMANDS
        assert shlex.split(line)[-2:] == [name, folder]


def test_a_folder_of_the_user_is_named_from_there_so_that_the_line_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    lines = what_next(Path("/home/somebody/.cache/asyncrl/async_ppo/trial0"), EXIT_OK)
    assert lines[0] == f"explain it {program()} doctor ~/.cache/asyncrl/async_ppo/trial0"
    assert max(map(len, lines)) <= 80
    spaced = what_next(Path("/home/somebody/my runs/trial0"), EXIT_OK)
    assert spaced[0].endswith(" doctor ~/'my runs/trial0'"), "a shell expands what is before the quotes"


def test_an_interrupted_run_says_how_to_continue() -> None:
    *_, last = what_next(Path("run"), EXIT_INTERRUPTED)
    assert last == "continue   the same command continues from the newest checkpoint"


def test_a_summary_that_fails_does_not_hide_how_a_detached_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        """A launcher whose run ended well."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def prepare(self) -> None:
            run_dir_of(config).mkdir(parents=True)

        def run(self) -> int:
            return EXIT_OK

    def fails(*args: object) -> None:
        raise OSError("the summary cannot be read")

    config = ExperimentConfig(fileroot=str(tmp_path))
    config.rollout.rehearse = False
    config.logging.display = DisplayMode.none
    monkeypatch.setattr(train, "Launcher", Ended)
    monkeypatch.setattr(train, "StartChecks", lambda config: nullcontext(SimpleNamespace(notes=list, statistics={})))
    for start in ("keep_data_record", "keep_inputs", "show_prompts"):
        monkeypatch.setattr(train, start, lambda *args: None)
    monkeypatch.setattr(train, "device_lines", lambda config: ())
    monkeypatch.setattr(train, "show_end", fails)
    with pytest.raises(OSError, match="summary"):
        train._run_rl(config, Console(quiet=True), None, True)
    assert (run_dir_of(config) / EXIT_FILE).read_text() == str(EXIT_OK)
