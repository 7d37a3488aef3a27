"""Errors of commands: a line each, and on a terminal lines that end between words."""

from __future__ import annotations

import os
import sys

import pytest

from asyncrl.launch.commands import refuse

MESSAGE = "reward.path='/a/very/long/folder/of/somebody/my_rewards.py:score': no module or file of that name is there"


def test_what_reads_errors_gets_one_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(ValueError(f"{MESSAGE}\nanother")) == 2
    assert capsys.readouterr().err == f"error: {MESSAGE}\nerror: another\n"


def test_a_terminal_gets_whole_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    refuse(MESSAGE)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == f"error: {MESSAGE}", "no word is cut, a long path neither"
    assert max(len(line) for line in lines if "/" not in line) <= int(os.environ["COLUMNS"])
