"""If the reader of a command's output stops, the command ends silently, and does nothing else to get there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from asyncrl.launch import __main__ as launch


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["async_ppo", "--help"], ["async_ppo", "--cfg", "job"], ["async_ppo", "--show-graph"]],
)
def test_a_reader_that_left_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "asyncrl.launch", *arguments]
    try:
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=570, check=False)
    finally:
        os.close(write)
    assert ended.stderr == ""
    assert ended.returncode in (0, 1)


@pytest.mark.parametrize("arguments", [["--help"], ["async_ppo", "--help"], ["show", "nowhere"]])
def test_a_broken_pipe_stays_an_exception(arguments: list[str]) -> None:
    """Else whoever writes to a child that has ended would be killed without a word."""
    launch.main(arguments)
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
