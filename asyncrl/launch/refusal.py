"""The message and exit code of a command that cannot do what it was asked for."""

from __future__ import annotations

import shutil
import sys
import textwrap

from asyncrl.runtime.exit_codes import EXIT_CONFIG


def refuse(message: object) -> int:
    """Print what is wrong, each line as an error; returns the exit code.

    A terminal gets lines that end between words. What reads it otherwise gets each error in one line.
    """
    for line in str(message).splitlines():
        text = f"error: {line}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=sys.stderr)
    return EXIT_CONFIG
