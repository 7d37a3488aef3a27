"""Logs of processes do not grow without limit: the launcher puts what is full aside, under the same name with `.1`.

Processes write to descriptors that the launcher opened for appending, so a file is copied and emptied in place: each
next line goes to its new beginning. What is written between the copy and the cut, microseconds apart, is lost.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

LOG_BYTES = 64 << 20
"""So much a log may hold; with the one put aside a process has twice as much at most."""
EVERY_S = 10.0

_log = logging.getLogger(__name__)


def rotate(folder: Path, limit: int = LOG_BYTES) -> list[Path]:
    """Put aside the logs in `folder` that are larger than `limit` bytes; returns them. One of which that fails, as on a
    full disk, stays as it is.
    """
    rotated = []
    for file in sorted(folder.glob("*.log")):
        try:
            if file.stat().st_size > limit:
                shutil.copyfile(file, file.with_name(f"{file.name}.1"))
                os.truncate(file, 0)
                rotated.append(file)
        except OSError as error:
            _log.warning("%s is not put aside: %s", file, error)
    return rotated
