"""Echo of typed keys on a terminal that a panel is drawn on."""

from __future__ import annotations

import os
import termios
from collections.abc import Callable
from typing import IO

_LOCAL_MODES = 3
"""Index of these modes in the list of `termios.tcgetattr`."""


def silence_keys(terminal: IO[str]) -> Callable[[], None]:
    """Stop `terminal` from echoing typed keys; return the function that restores its modes.

    An echoed `^C` or Enter moves the cursor by a line, so that a panel which is drawn in place would leave a line of
    its last frame. Ctrl-C still interrupts. Nothing is changed if `terminal` is no terminal, or while another process
    group has it: the kernel stops a background process that changes modes.
    """
    try:
        descriptor = terminal.fileno()
        modes = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        return lambda: None
    silent = list(modes)
    silent[_LOCAL_MODES] &= ~termios.ECHO
    _set_modes(descriptor, silent)
    return lambda: _set_modes(descriptor, modes)


def _set_modes(descriptor: int, modes: list[int | list[bytes | int]]) -> None:
    try:
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
    except (OSError, termios.error):
        return  # the terminal was closed, or controls other processes than this one
