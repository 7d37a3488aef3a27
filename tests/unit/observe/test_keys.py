"""The echo of typed keys is off while a panel is drawn, on the terminal that a process controls only."""

from __future__ import annotations

import os
import subprocess
import sys
import termios

from asyncrl.observe.display import silence_keys

CONTROLS = """
import os, sys, termios
from asyncrl.observe.display import silence_keys
with os.fdopen(os.open(sys.argv[1], os.O_RDWR), "w") as terminal:  # a new session controls the first that it opens
    echoes = lambda: bool(termios.tcgetattr(terminal)[3] & termios.ECHO)
    interrupts = lambda: bool(termios.tcgetattr(terminal)[3] & termios.ISIG)
    before = echoes()
    restore = silence_keys(terminal)
    during = echoes(), interrupts()
    restore()
    print(before, during, echoes())
"""


def test_keys_are_not_echoed_until_the_modes_are_restored() -> None:
    master, slave = os.openpty()
    try:
        command = [sys.executable, "-c", CONTROLS, os.ttyname(slave)]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, start_new_session=True
        )
    finally:
        os.close(slave)
        os.close(master)
    assert ended.stdout == "True (False, True) True\n", ended.stderr


def test_a_terminal_of_other_processes_keeps_its_modes() -> None:
    master, slave = os.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as terminal:
        modes = termios.tcgetattr(terminal)
        restore = silence_keys(terminal)
        assert termios.tcgetattr(terminal) == modes
        restore()
