"""Message and exit code of a command that cannot do its work."""

from __future__ import annotations

import shutil
import sys
import textwrap

from asyncrl.config.secrets import hide
from asyncrl.runtime.exit_codes import EXIT_CONFIG

ERROR = "error: "
"""Begin of each line that `refuse` prints."""


def refuse(message: object) -> int:
    """Print each line of `message` as an error; return the exit code.

    Secrets are hidden. On a terminal, lines are wrapped between words. Otherwise each error is one line.
    """
    for line in hide(str(message)).splitlines():
        text = f"{ERROR}{line}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=sys.stderr)
    return EXIT_CONFIG
